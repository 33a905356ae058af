/* SPDX-License-Identifier: Apache-2.0
 * An engine with OpenMP regions of its own before, between, around and after its calls. Both sides' results and the
 * region's threads, settings and binding are checked every time. */
#define _GNU_SOURCE 1
#include <gdn.h>

#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

enum { dim = 32, n_heads = 8, n_seqs = 4, n_rounds = 200, n_threads_own = 3 };

static uint16_t qkv[n_seqs * n_heads * dim], out[n_seqs * n_heads * dim];
static float state[n_seqs * n_heads * dim * dim];

/* q = k = v = the first unit vector and the state starts from zero: the output is v. */
static int call(gdn_ctx *ctx, uint16_t *own_out) {
  gdn_decode_args args = {0};
  args.struct_size = sizeof args;
  args.n_seqs = n_seqs;
  args.n_heads_k = args.n_heads_v = n_heads;
  args.dim_k = args.dim_v = dim;
  args.scale = 1.0f;
  args.q.data = args.k.data = args.v.data = qkv;
  args.out.data = own_out;
  if (own_out == out) {
    args.final_state.data = state;
    args.final_state.n_rows = n_seqs;
  }
  return gdn_decode(ctx, &args) || memcmp(own_out, qkv, sizeof qkv);
}

/* A region as engines have them: every thread works, the sum is known. Each thread also tells whether it may run where
 * it might before the library came. */
static int region(const cpu_set_t *cpus) {
  int sum = 0, n = 0, n_moved = 0;
#pragma omp parallel num_threads(n_threads_own) reduction(+ : sum, n, n_moved)
  {
    cpu_set_t mine;
    n = 1;
    sched_getaffinity(0, sizeof mine, &mine);
    n_moved = !CPU_EQUAL(&mine, cpus);
#pragma omp for
    for (int i = 0; i < 1000; i++) sum += i;
  }
  return sum != 499500 || n != n_threads_own || n_moved;
}

int main(void) {
  cpu_set_t cpus;
  gdn_ctx *ctx = NULL;
  int bad = 0;
  for (int i = 0; i < n_seqs * n_heads; i++) qkv[i * dim] = 0x3f80; /* 1.0 as bf16 */
  sched_getaffinity(0, sizeof cpus, &cpus);
  omp_set_num_threads(2);
  bad += region(&cpus);
  if (gdn_ctx_create(NULL, &ctx)) {
    fprintf(stderr, "%s\n", gdn_last_error());
    return 1;
  }
  for (int round = 0; round < n_rounds; round++) {
    bad += call(ctx, out);
    bad += region(&cpus);
    if (round % 10 == 0) {
      int n_wrong = 0;
#pragma omp parallel num_threads(n_threads_own) reduction(+ : n_wrong)
      {
        static uint16_t own[n_threads_own][n_seqs * n_heads * dim];
        n_wrong = call(ctx, own[omp_get_thread_num()]);
      }
      bad += n_wrong;
    }
  }
  gdn_ctx_destroy(ctx);
  bad += region(&cpus);
  bad += omp_get_max_threads() != 2;
  printf("%d rounds, %d wrong\n", n_rounds, bad);
  return bad != 0;
}
