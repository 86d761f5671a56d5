"""Model providers of a user, with the reference system's signature."""


def own_config(pre_process=True, post_process=True, vp_stage=None):
    """Build a model of a configuration of its own."""
    return ("model", pre_process, post_process, vp_stage)


def without_stage(pre_process, post_process):
    """Know nothing of virtual stages."""
    return ("model", pre_process, post_process)
