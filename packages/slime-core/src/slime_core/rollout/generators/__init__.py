"""The generators that come with core: how one response is made."""
