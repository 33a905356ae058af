/* SPDX-License-Identifier: Apache-2.0
 * What the subcommands of gdn-bench share: options, the context under test, made-up batches. */
#ifndef GDN_BENCH_H
#define GDN_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "gdn.h"
#include "report.h"

/* Exit statuses. */
enum {
  BENCH_OK = 0,
  BENCH_FAILED = 1, /* a case does not meet its bounds */
  BENCH_UNABLE = 2  /* wrong usage, malformed input, or an error that keeps from measuring */
};

struct bench_options {
  bool json;
  bool baseline;
  int32_t isa;      /* GDN_ISA_*, 0 = not asked for */
  int32_t form;     /* GDN_FORM_* */
  int32_t schedule; /* GDN_SCHEDULE_* */
  int32_t versus;   /* GDN_ISA_* of a tier to be timed beside; 0 = none */
  int64_t threads;
  const char *cpus;           /* null = those of the affinity mask */
  const char *first, *second; /* cpus of the contexts of halves; null = halves of cpus */
  double seconds;
  const char *lens;
  int64_t batch;
  int64_t heads, v_heads, dim_k, dim_v;
  int64_t tokens; /* of each sequence in a decode call */
  int32_t state;  /* GDN_F32, GDN_BF16 or GDN_F16 */
  int32_t layout; /* GDN_LAYOUT_* */
  bool raw_gates;
  int64_t requests, prefix, suffix, steps, page_size, layers;
  char **dirs; /* [n_dirs] */
  int n_dirs;
};

int bench_run(const struct bench_options *o);
int bench_prefill(const struct bench_options *o);
int bench_decode(const struct bench_options *o);
int bench_paged(const struct bench_options *o);
int bench_latency(const struct bench_options *o);
int bench_products(const struct bench_options *o);
int bench_steps(const struct bench_options *o);
int bench_halves(const struct bench_options *o);
int bench_info(const struct bench_options *o);

/* Prints "gdn-bench: ..." to stderr and returns BENCH_UNABLE. */
__attribute__((format(printf, 1, 2))) int bench_error(const char *format, ...);
/* BENCH_OK for GDN_OK; else reports call, status and the library's text. */
int bench_check(gdn_status status, const char *call);

/* ---- main.c: the context under test ---- */

struct bench_session {
  gdn_ctx *ctx;
  gdn_info info;
};

/* Makes the context that the options ask for; an error if it would run on another tier than asked. */
int bench_open(const struct bench_options *o, struct bench_session *s);
void bench_close(struct bench_session *s);
/* Scratch held by the context now, not when it was made. */
uint64_t bench_scratch_bytes(const struct bench_session *s);
/* The instruction set that libxsmm's products are limited to: "hsw", or "native". */
const char *bench_product_target(void);
/* What the figures were taken on: an object "conditions", or lines. */
void bench_conditions_json(struct json *j, const struct bench_session *s);
void bench_conditions_print(const struct bench_session *s);
/* "recurrent" or "chunk". */
const char *bench_form_name(int32_t form);

/* ---- baseline.c: made-up tokens ---- */

struct bench_batch {
  int64_t n_seqs, n_tokens; /* set by the caller, as are the next five */
  int heads, v_heads, dim_k, dim_v;
  int32_t *cu_seqlens; /* [n_seqs + 1], malloc'ed; owned by the batch from then on; null for decode */
  uint16_t *q, *k, *v, *out;
  float *g, *beta;
  float *states;       /* [n_seqs][v_heads][dim_v][dim_k] */
  uint16_t *plain_out; /* null unless asked for */
};

/* Allocates and fills a batch, placed by the workers of ctx: q, k, v normal, g in [-0.2, 0], beta in (0, 1), states
 * small. Refuses what would not fit the machine's memory. The caller ends it with batch_destroy, also on an error. */
int batch_create(struct bench_batch *b, gdn_ctx *ctx, bool with_plain_out);
void batch_destroy(struct bench_batch *b);
/* Floats of one sequence's states. */
int64_t batch_state_elems(const struct bench_batch *b);
/* A call on the batch, of its n_seqs sequences, without states; decode: of one token each. */
gdn_prefill_args batch_prefill_args(const struct bench_batch *b, int32_t form);
gdn_decode_args batch_decode_args(const struct bench_batch *b);
/* Sets n_seqs, n_tokens and cu_seqlens from "4096", "512x8" or "37,64,100" (prefill.c). */
int bench_parse_lens(const char *lens, struct bench_batch *b);
/* Calls on b: prefill from nothing (prefill.c), and what the decode command times (decode.c). */
gdn_prefill_args bench_prefill_args(const struct bench_batch *b, int32_t form, int32_t schedule);
gdn_decode_args bench_decode_args(const struct bench_batch *b, const struct bench_options *o);
/* A loop x[i] *= factor over n elements as the compiler makes it for a tier (decode.c). */
typedef void (*bench_scale_fn)(float *x, int64_t n, float factor);
bench_scale_fn bench_scale_for(const char *isa);
/* n elements, 64-byte aligned, not yet touched when large; end with free. Null when out of memory. */
void *bench_alloc(int64_t n, int64_t elem_bytes);

/* ---- baseline.c: the rule in plain C, for comparison ---- */

struct plain;
/* The plain C recurrence over b, parallel over sequences and heads on the workers of ctx; isa caps its compilation. */
struct plain *plain_create(const struct bench_batch *b, gdn_ctx *ctx, const char *isa, int n_threads);
void plain_destroy(struct plain *p);
/* arg is a struct plain; a case of measure.h. Zero initial states; writes plain_out and states. */
int plain_run(void *arg);

/* Which copy of a function that is compiled several times fits processor and tier. */
enum bench_vectors { BENCH_SSE2, BENCH_AVX2, BENCH_AVX512 };
enum bench_vectors bench_vectors_for(const char *isa);
#define BENCH_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define BENCH_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))

static inline float bench_bf16_to_f32(uint16_t bits) {
  union {
    uint32_t u;
    float f;
  } x = {.u = (uint32_t)bits << 16};
  return x.f;
}

/* Rounds to nearest even; made-up numbers and results are never NaN here. */
static inline uint16_t bench_f32_to_bf16(float value) {
  union {
    float f;
    uint32_t u;
  } x = {.f = value};
  return (uint16_t)((x.u + 0x7FFFu + (x.u >> 16 & 1u)) >> 16);
}

#endif
