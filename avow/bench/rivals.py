"""Every exact attention of PyTorch that can decode here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from avow.bench.cases import Case, distances

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def exact(case: Case) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every exact attention that is right here, sibling heads as heads that share keys and as rows of one head."""
    groups, d = case.k.shape[1], case.q.shape[-1]
    q = case.q.unsqueeze(2)
    rows = case.q.view(1, groups, -1, d)
    names = ["cuDNN", "flash", "efficient"] if case.q.is_cuda else ["flash", "math"]
    for name in names:
        for form, x, shared in (("heads", q, True), ("rows", rows, False)):

            def call(x: Tensor = x, shared: bool = shared, name: str = name) -> Tensor:
                with sdpa_kernel(BACKENDS[name]):
                    return scaled_dot_product_attention(x, case.k, case.v, scale=case.scale, enable_gqa=shared)

            try:
                out = call().reshape(case.q.shape)
            except RuntimeError as error:
                print(f"  {name}, {form}: does not run here ({str(error).splitlines()[0][:80]})", file=sys.stderr)
                continue
            if float(distances(case, out).max()) < 0.05:
                yield f"{name}, {form}", call
