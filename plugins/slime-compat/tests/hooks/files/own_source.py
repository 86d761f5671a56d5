"""Data sources of a user, with the reference system's interface."""

from slime.rollout.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample


class Counting(DataSource):
    """Prompts by counting."""

    def __init__(self, args):
        self.args, self.taken = args, 0

    def get_samples(self, num_samples):
        """Return letters, one after the other."""
        groups = []
        for _ in range(num_samples):
            letter = chr(97 + self.taken % 5)
            n = self.args.n_samples_per_prompt
            groups.append(
                [
                    Sample(
                        group_index=self.taken,
                        index=self.taken * n + i,
                        prompt=letter,
                        label=chr(ord(letter) + 1),
                    )
                    for i in range(n)
                ]
            )
            self.taken += 1
        return groups

    def add_samples(self, samples):
        """Take nothing back."""
        raise RuntimeError("never")

    def save(self, rollout_id):
        """Write how far it is."""
        import os

        os.makedirs(self.args.save, exist_ok=True)
        with open(f"{self.args.save}/counting_{rollout_id}", "w") as file:
            file.write(str(self.taken))

    def load(self, rollout_id=None):
        """Go on."""
        with open(f"{self.args.load}/counting_{rollout_id}") as file:
            self.taken = int(file.read())


class Curriculum(RolloutDataSourceWithBuffer):
    """The run's prompts, each with a note."""

    def get_samples(self, num_samples):
        """Note the number of groups that were taken before."""
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata["offset"] = self.sample_offset
        return groups


class Plain(RolloutDataSource):
    """The run's prompts."""
