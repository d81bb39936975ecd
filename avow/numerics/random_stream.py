"""The draws of a random method: from a stream of their own, which no input was made from."""

from __future__ import annotations

import hashlib

import torch

INDEPENDENT = "the draws are independent of q, k and v"
"""What every promise that holds with a probability assumes of its generator."""


class RandomStream(torch.Generator):
    """A generator whose seed nobody makes inputs from."""


def random_stream(generator: torch.Generator | None, device: torch.device | str) -> RandomStream:
    """A generator seeded by a hash of the caller's next number; on the caller's device, or else on the given one.

    Inputs are often made from a seed which is set again before the call. Draws taken from the caller's generator itself
    would then be the very numbers that the inputs are made of, and nothing could be promised of them.
    """
    if isinstance(generator, RandomStream):
        return generator
    home = torch.device(device) if generator is None else generator.device
    number = torch.randint(2**62, (), generator=generator, device="cpu" if generator is None else home)
    digest = hashlib.blake2b(int(number).to_bytes(8, "little"), digest_size=8, person=b"avow draws").digest()
    stream = RandomStream(home)
    stream.manual_seed(int.from_bytes(digest, "little") >> 1)
    return stream
