/* SPDX-License-Identifier: Apache-2.0
 * Batches of made-up tokens, and the rule token by token in plain C, for comparison: what the compiler makes of the
 * textbook loops. */
#include "bench.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DIM_MAX 256
#define ALIGN_BYTES 64
#define FILL_BLOCK 4096

/* Whatever the build type: this stands for what a compiler makes of plain loops. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=fast")
#endif

/* ---- memory ---- */

void *bench_alloc(int64_t n, int64_t elem_bytes) {
  if (n < 0 || n > (INT64_MAX - ALIGN_BYTES) / elem_bytes) {
    return NULL;
  }
  return aligned_alloc(ALIGN_BYTES, (size_t)((n * elem_bytes / ALIGN_BYTES + 1) * ALIGN_BYTES));
}

int64_t batch_state_elems(const struct bench_batch *b) {
  return (int64_t)b->v_heads * b->dim_v * b->dim_k;
}

gdn_prefill_args batch_prefill_args(const struct bench_batch *b, int32_t form) {
  return (gdn_prefill_args){.struct_size = sizeof(gdn_prefill_args),
                            .flags = GDN_L2NORM_QK,
                            .form = form,
                            .n_seqs = b->n_seqs,
                            .n_tokens = b->n_tokens,
                            .n_heads_k = b->heads,
                            .n_heads_v = b->v_heads,
                            .dim_k = b->dim_k,
                            .dim_v = b->dim_v,
                            .cu_seqlens = b->cu_seqlens,
                            .cu_seqlens_dtype = GDN_I32,
                            .q = {.data = b->q, .dtype = GDN_BF16},
                            .k = {.data = b->k, .dtype = GDN_BF16},
                            .v = {.data = b->v, .dtype = GDN_BF16},
                            .g = {.data = b->g, .dtype = GDN_F32},
                            .beta = {.data = b->beta, .dtype = GDN_F32},
                            .out = {.data = b->out, .dtype = GDN_BF16}};
}

gdn_decode_args batch_decode_args(const struct bench_batch *b) {
  const gdn_prefill_args a = batch_prefill_args(b, GDN_FORM_DEFAULT);
  return (gdn_decode_args){.struct_size = sizeof(gdn_decode_args),
                           .flags = a.flags,
                           .n_seqs = a.n_seqs,
                           .n_heads_k = a.n_heads_k,
                           .n_heads_v = a.n_heads_v,
                           .dim_k = a.dim_k,
                           .dim_v = a.dim_v,
                           .q = a.q,
                           .k = a.k,
                           .v = a.v,
                           .g = a.g,
                           .beta = a.beta,
                           .out = a.out};
}

/* Counts are below 2^31 and widths below 2^28 here, so that only the sum needs a double. */
static int check_memory(const struct bench_batch *b, bool with_plain_out) {
  double per_token =
      2.0 * 2 * b->heads * b->dim_k + (with_plain_out ? 3.0 : 2.0) * 2 * b->v_heads * b->dim_v + 2.0 * 4 * b->v_heads;
  double bytes = per_token * (double)b->n_tokens + 4.0 * (double)batch_state_elems(b) * (double)b->n_seqs;
  double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
  if (bytes > 0.9 * memory) {
    return bench_error("%lld sequences with %lld tokens need %.1f GiB of tokens and states, the machine has %.1f",
                       (long long)b->n_seqs, (long long)b->n_tokens, bytes / 0x1p30, memory / 0x1p30);
  }
  return BENCH_OK;
}

/* ---- made-up tokens ---- */

/* splitmix64: a number depends on its index only, whichever worker makes it. */
static uint64_t hash(uint64_t index) {
  uint64_t z = index * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static float uniform(uint64_t index) {
  return (float)(hash(index) >> 40) * 0x1p-24f;
}

/* Nearly normal, variance 1: four uniform 16-bit numbers together. */
static float normal(uint64_t index) {
  uint64_t h = hash(index);
  float sum = (float)(h & 0xFFFF) + (float)(h >> 16 & 0xFFFF) + (float)(h >> 32 & 0xFFFF) + (float)(h >> 48);
  return (sum * 0x1p-16f - 2.0f) * 1.7320508f;
}

enum fill_kind { FILL_NORMAL_BF16, FILL_ZERO_BF16, FILL_GATE, FILL_BETA, FILL_STATE };

struct fill {
  void *data;
  int64_t n;
  enum fill_kind kind;
  uint64_t seed;
};

static void fill_elem(const struct fill *f, int64_t i) {
  uint64_t index = f->seed + (uint64_t)i;
  switch (f->kind) {
  case FILL_NORMAL_BF16:
    ((uint16_t *)f->data)[i] = bench_f32_to_bf16(normal(index));
    break;
  case FILL_ZERO_BF16:
    ((uint16_t *)f->data)[i] = 0;
    break;
  case FILL_GATE:
    ((float *)f->data)[i] = -0.2f * uniform(index);
    break;
  case FILL_BETA:
    ((float *)f->data)[i] = 0x1p-25f + uniform(index);
    break;
  case FILL_STATE:
    ((float *)f->data)[i] = 0.1f * normal(index);
    break;
  }
}

/* Worker w fills the w-th part, so that its pages lie near it. */
static void fill_worker(void *arg, int32_t worker, int32_t n_workers) {
  const struct fill *f = arg;
  int64_t blocks = f->n / FILL_BLOCK + 1;
  int64_t begin = blocks * worker / n_workers * FILL_BLOCK;
  int64_t end = blocks * (worker + 1) / n_workers * FILL_BLOCK;
  for (int64_t i = begin; i < end && i < f->n; i++) {
    fill_elem(f, i);
  }
}

static int make_array(gdn_ctx *ctx, void **array, int64_t n, enum fill_kind kind, uint64_t seed) {
  int64_t elem_bytes = kind == FILL_NORMAL_BF16 || kind == FILL_ZERO_BF16 ? 2 : 4;
  *array = bench_alloc(n, elem_bytes);
  if (!*array) {
    return bench_error("out of memory for %lld elements of a batch", (long long)n);
  }
  struct fill f = {*array, n, kind, seed << 40};
  return bench_check(gdn_ctx_run(ctx, fill_worker, &f), "gdn_ctx_run");
}

int batch_create(struct bench_batch *b, gdn_ctx *ctx, bool with_plain_out) {
  int64_t n_qk = b->n_tokens * b->heads * b->dim_k;
  int64_t n_v = b->n_tokens * b->v_heads * b->dim_v;
  int64_t n_gates = b->n_tokens * b->v_heads;
  void *arrays[8] = {NULL};
  const struct {
    int64_t n;
    enum fill_kind kind;
  } made[8] = {{n_qk, FILL_NORMAL_BF16},
               {n_qk, FILL_NORMAL_BF16},
               {n_v, FILL_NORMAL_BF16},
               {n_v, FILL_ZERO_BF16},
               {n_gates, FILL_GATE},
               {n_gates, FILL_BETA},
               {b->n_seqs * batch_state_elems(b), FILL_STATE},
               {n_v, FILL_ZERO_BF16}};
  int status = check_memory(b, with_plain_out);
  for (int i = 0; i < (with_plain_out ? 8 : 7) && status == BENCH_OK; i++) {
    status = make_array(ctx, &arrays[i], made[i].n, made[i].kind, (uint64_t)i);
  }
  b->q = arrays[0];
  b->k = arrays[1];
  b->v = arrays[2];
  b->out = arrays[3];
  b->g = arrays[4];
  b->beta = arrays[5];
  b->states = arrays[6];
  b->plain_out = arrays[7];
  return status;
}

void batch_destroy(struct bench_batch *b) {
  free(b->cu_seqlens);
  free(b->q);
  free(b->k);
  free(b->v);
  free(b->out);
  free(b->g);
  free(b->beta);
  free(b->states);
  free(b->plain_out);
  memset(b, 0, sizeof *b);
}

/* ---- the rule in plain C ---- */

enum bench_vectors bench_vectors_for(const char *isa) {
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (strcmp(isa, "ref") == 0 || !avx2) {
    return BENCH_SSE2;
  }
  return strcmp(isa, "avx2") == 0 || !avx512 ? BENCH_AVX2 : BENCH_AVX512;
}

/* One head's buffers: state [K][V], so that the inner loops run along V without a sum across it. */
struct head {
  int dim_k, dim_v;
  float *state;
  float q[DIM_MAX], k[DIM_MAX], v[DIM_MAX], delta[DIM_MAX], out[DIM_MAX];
};

typedef void token_fn(struct head *h, float decay, float beta);

static inline __attribute__((always_inline)) void token(struct head *h, float decay, float beta) {
  const int dim_v = h->dim_v;
  float *restrict delta = h->delta;
  float *restrict out = h->out;
  memset(h->delta, 0, sizeof h->delta);
  memset(h->out, 0, sizeof h->out);
  for (int i = 0; i < h->dim_k; i++) {
    float *restrict row = h->state + (int64_t)i * dim_v;
    const float k = h->k[i];
    for (int j = 0; j < dim_v; j++) {
      row[j] *= decay;
      delta[j] += row[j] * k;
    }
  }
  for (int j = 0; j < dim_v; j++) {
    delta[j] = beta * (h->v[j] - delta[j]);
  }
  for (int i = 0; i < h->dim_k; i++) {
    float *restrict row = h->state + (int64_t)i * dim_v;
    const float k = h->k[i];
    const float q = h->q[i];
    for (int j = 0; j < dim_v; j++) {
      row[j] += delta[j] * k;
      out[j] += row[j] * q;
    }
  }
}

static void token_sse2(struct head *h, float decay, float beta) {
  token(h, decay, beta);
}

BENCH_TARGET_AVX2 static void token_avx2(struct head *h, float decay, float beta) {
  token(h, decay, beta);
}

BENCH_TARGET_AVX512 static void token_avx512(struct head *h, float decay, float beta) {
  token(h, decay, beta);
}

struct plain {
  const struct bench_batch *batch;
  gdn_ctx *ctx;
  token_fn *token;
  struct head *heads; /* [n_threads] */
  float *states;      /* [n_threads][DIM_MAX][DIM_MAX] */
  int n_threads;
  atomic_llong next; /* task: sequence and value head */
};

static void load_normalised(const uint16_t *row, int n, float scale, float *to) {
  float sum = 0;
  for (int i = 0; i < n; i++) {
    to[i] = bench_bf16_to_f32(row[i]);
    sum += to[i] * to[i];
  }
  float factor = scale / sqrtf(sum + 1e-6f);
  for (int i = 0; i < n; i++) {
    to[i] *= factor;
  }
}

static void run_head(const struct plain *p, struct head *h, int64_t seq, int hv) {
  const struct bench_batch *b = p->batch;
  const int hk = hv / (b->v_heads / b->heads);
  const float scale = 1.0f / sqrtf((float)b->dim_k);
  memset(h->state, 0, sizeof(float) * (size_t)b->dim_k * (size_t)b->dim_v);
  for (int64_t t = b->cu_seqlens[seq]; t < b->cu_seqlens[seq + 1]; t++) {
    int64_t gate = t * b->v_heads + hv;
    load_normalised(b->q + (t * b->heads + hk) * b->dim_k, b->dim_k, scale, h->q);
    load_normalised(b->k + (t * b->heads + hk) * b->dim_k, b->dim_k, 1.0f, h->k);
    for (int j = 0; j < b->dim_v; j++) {
      h->v[j] = bench_bf16_to_f32(b->v[gate * b->dim_v + j]);
    }
    p->token(h, expf(b->g[gate]), b->beta[gate]);
    for (int j = 0; j < b->dim_v; j++) {
      b->plain_out[gate * b->dim_v + j] = bench_f32_to_bf16(h->out[j]);
    }
  }
  float *rows = b->states + seq * batch_state_elems(b) + (int64_t)hv * b->dim_v * b->dim_k;
  for (int j = 0; j < b->dim_v; j++) {
    for (int i = 0; i < b->dim_k; i++) {
      rows[j * b->dim_k + i] = h->state[i * b->dim_v + j];
    }
  }
}

static void plain_worker(void *arg, int32_t worker, int32_t n_workers) {
  struct plain *p = arg;
  const int64_t n_tasks = p->batch->n_seqs * p->batch->v_heads;
  (void)n_workers;
  for (int64_t task; (task = atomic_fetch_add(&p->next, 1)) < n_tasks;) {
    run_head(p, &p->heads[worker], task / p->batch->v_heads, (int)(task % p->batch->v_heads));
  }
}

struct plain *plain_create(const struct bench_batch *b, gdn_ctx *ctx, const char *isa, int n_threads) {
  static token_fn *const tokens[] = {
      [BENCH_SSE2] = token_sse2, [BENCH_AVX2] = token_avx2, [BENCH_AVX512] = token_avx512};
  struct plain *p = calloc(1, sizeof *p);
  if (!p) {
    return NULL;
  }
  p->batch = b;
  p->ctx = ctx;
  p->token = tokens[bench_vectors_for(isa)];
  p->n_threads = n_threads;
  p->heads = bench_alloc(n_threads, sizeof *p->heads);
  p->states = bench_alloc((int64_t)n_threads * DIM_MAX * DIM_MAX, sizeof(float));
  if (!p->heads || !p->states) {
    plain_destroy(p);
    return NULL;
  }
  for (int i = 0; i < n_threads; i++) {
    p->heads[i].dim_k = b->dim_k;
    p->heads[i].dim_v = b->dim_v;
    p->heads[i].state = p->states + (int64_t)i * DIM_MAX * DIM_MAX;
  }
  return p;
}

void plain_destroy(struct plain *p) {
  if (p) {
    free(p->heads);
    free(p->states);
    free(p);
  }
}

int plain_run(void *arg) {
  struct plain *p = arg;
  atomic_store(&p->next, 0);
  return bench_check(gdn_ctx_run(p->ctx, plain_worker, p), "gdn_ctx_run");
}
