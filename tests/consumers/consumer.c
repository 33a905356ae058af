/* SPDX-License-Identifier: Apache-2.0
 * A program of someone else: links libgdn and runs two tokens whose result is known by hand. */
#include <gdn.h>

#include <stdio.h>

int main(void) {
  enum { dim = 32 };
  uint16_t q[2 * dim] = {0}, k[2 * dim] = {0}, v[2 * dim] = {0}, out[2 * dim];
  int32_t cu_seqlens[2] = {0, 2};
  gdn_prefill_args args = {0};
  gdn_ctx *ctx = NULL;
  int i, bad = 0;

  /* k and q are the first unit vector in both tokens, so the second value replaces the first. */
  q[0] = q[dim] = k[0] = k[dim] = 0x3f80; /* 1.0 as bf16 */
  for (i = 0; i < dim; i++) {
    v[i] = 0x4000;       /* 2.0 */
    v[dim + i] = 0xc040; /* -3.0 */
  }
  args.struct_size = sizeof args;
  args.n_seqs = 1;
  args.n_tokens = 2;
  args.n_heads_k = args.n_heads_v = 1;
  args.dim_k = args.dim_v = dim;
  args.scale = 1.0f;
  args.cu_seqlens = cu_seqlens;
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.out.data = out;
  if (gdn_version() != GDN_VERSION || gdn_ctx_create(NULL, &ctx) || gdn_prefill(ctx, &args)) {
    fprintf(stderr, "libgdn %s: %s\n", gdn_version_string(), gdn_last_error());
    return 1;
  }
  for (i = 0; i < 2 * dim; i++) bad += out[i] != v[i];
  gdn_ctx_destroy(ctx);
  printf("libgdn %s: %d of %d values wrong\n", gdn_version_string(), bad, 2 * dim);
  return bad != 0;
}
