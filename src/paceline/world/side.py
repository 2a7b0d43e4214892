"""Messages beside a Group's, which neither counts nor times them."""

import torch
import torch.distributed as dist


class SideChannel:
    """Sends and receives CPU tensors from any thread, in its own Gloo process group. Creating it is collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when the tensor may be overwritten. Raises RuntimeError if the other rank is gone."""
        dist.send(tensor, to, group=self._group)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fills the tensor with what the source sends. Raises RuntimeError if the source is gone."""
        dist.recv(tensor, source, group=self._group)
