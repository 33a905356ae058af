# SPDX-License-Identifier: Apache-2.0
"""PyTorch's bfloat16 products between calls of libgdn in one process, both sides checked every round.

    torch_between_calls.py LIBRARY [ROUNDS]

Exit status 77 where torch or numpy is not installed. On processors with AMX both use the tile registers."""
import sys

try:
    import numpy as np
    import torch
except ImportError as error:
    print(f"skipped: {error.name} is not installed")
    sys.exit(77)

import gdn as binding


def main(path, n_rounds):
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    n, heads, v_heads, dim = 300, 4, 8, 128
    q, k = (binding.to_bf16(rng.standard_normal((n, heads, dim))) for _ in range(2))
    v = binding.to_bf16(rng.standard_normal((n, v_heads, dim)))
    g = (-0.2 * rng.random((n, v_heads))).astype(np.float32)
    beta = rng.random((n, v_heads)).astype(np.float32)
    cu_seqlens = np.array([0, 100, n], np.int32)
    a = torch.randn(512, 512).to(torch.bfloat16)
    b = torch.randn(512, 512).to(torch.bfloat16)
    want_product = a.float() @ b.float()
    library = binding.Library(path)
    n_torch_threads, n_wrong, want = torch.get_num_threads(), 0, None
    with library.context() as ctx:
        for _ in range(n_rounds):
            product = (a @ b).float()
            pool = np.zeros((2, v_heads, dim, dim), np.float32)
            result = [ctx.prefill(q, k, v, g, beta, cu_seqlens, final_state=pool, form=form)
                      for form in (0, binding.FORM_RECURRENT, binding.FORM_CHUNK)]
            result += [ctx.decode(q[:2], k[:2], v[:2], g[:2], beta[:2], pool), pool]
            want = want or result
            error = ((product - want_product).norm() / want_product.norm()).item()
            n_wrong += error > 5e-3  # bfloat16 rounding of the products is 2e-3
            n_wrong += not all(np.array_equal(x, y) for x, y in zip(result, want))
        print(f"tier {ctx.info().isa.decode()}, {n_rounds} rounds, {n_wrong} wrong; torch {torch.__version__} on "
              f"{n_torch_threads} threads")
    return 1 if n_wrong or torch.get_num_threads() != n_torch_threads else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 50))
