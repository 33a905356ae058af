/* SPDX-License-Identifier: Apache-2.0
 * Layer 3: shapes and order of work. A call becomes a gdn_batch (validate.c), a batch becomes tasks (plan.c), tasks
 * run on the context's workers (prefill.c, decode.c). No intrinsics here. */
#ifndef GDN_ENGINE_H
#define GDN_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "gdn.h"
#include "ints.h"
#include "kernels/gemm.h"
#include "kernels/kernels.h"
#include "paged/paged.h"
#include "platform.h"

/* Sets this thread's error text and returns status. */
gdn_status gdn_fail(gdn_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- a checked call ---- */

/* [token][head][dim]; strides are final, never "0 = dense". */
struct gdn_array {
  char *data; /* null = absent */
  int64_t token_stride_elems, head_stride_elems;
  int32_t dtype; /* GDN_F32, GDN_BF16 or GDN_F16 */
  int share;     /* heads of the batch that use one head of the array: 1 but for k and v of more q heads than v heads */
};

struct gdn_pool {
  char *data; /* null = absent */
  int64_t n_rows, row_stride_elems;
  struct gdn_ints rows; /* absent = row i for sequence (or checkpoint) i */
  int32_t dtype;        /* GDN_F32, GDN_BF16 or GDN_F16 */
  int32_t k_major;      /* 1: GDN_LAYOUT_KV */
};

struct gdn_batch {
  int64_t n_seqs, n_tokens;
  struct gdn_ints cu_seqlens;   /* absent = decode: */
  int64_t tokens_per_seq;       /* T: sequence i starts at token i T */
  struct gdn_ints token_counts; /* and has this many, absent = T */
  int n_heads_k, n_heads_v;     /* heads of q, and of g, beta, out, states; see also struct gdn_array */
  int dim_k, dim_v;
  int l2norm, form, schedule;
  float scale, eps;
  struct gdn_array q, k, v, g, beta, out;
  int g_mode, beta_sigmoid;       /* what g and beta hold, as in struct gdn_gates */
  struct gdn_rows a_log, dt_bias; /* of all heads */
  float softplus_threshold;
  struct gdn_pool initial, final;
  struct gdn_ints prefix_lens;          /* absent = 0 */
  int64_t checkpoint_every;             /* 0 = no checkpoints; 1 in decode: token_states */
  struct gdn_ints checkpoint_cu_starts; /* [n_seqs + 1]; absent in decode */
  struct gdn_pool checkpoints;          /* row index: checkpoint_cu_starts[seq] + j, in decode i T + j */
  const char *pool_name;                /* what error texts call all three pools; null = each by its field's name */
};

static inline int64_t gdn_batch_start(const struct gdn_batch *b, int64_t seq) {
  return b->cu_seqlens.data ? gdn_int(&b->cu_seqlens, seq) : seq * b->tokens_per_seq;
}

static inline int64_t gdn_batch_len(const struct gdn_batch *b, int64_t seq) {
  if (b->cu_seqlens.data) return gdn_int(&b->cu_seqlens, seq + 1) - gdn_int(&b->cu_seqlens, seq);
  return b->token_counts.data ? gdn_int(&b->token_counts, seq) : b->tokens_per_seq;
}

static inline int64_t gdn_batch_prefix(const struct gdn_batch *b, int64_t seq) {
  return b->prefix_lens.data ? gdn_int(&b->prefix_lens, seq) : 0;
}

/* Row of sequence or checkpoint i; -1 = none. */
static inline int64_t gdn_pool_row(const struct gdn_pool *p, int64_t i) {
  return !p->data ? -1 : p->rows.data ? gdn_int(&p->rows, i) : i;
}

static inline int gdn_dtype_bytes(int32_t dtype) {
  return dtype == GDN_F32 ? 4 : 2;
}

/* The rows of one head from token on. */
static inline struct gdn_rows gdn_array_rows(const struct gdn_array *a, int64_t token, int head) {
  struct gdn_rows r = {a->data, a->token_stride_elems, a->dtype};
  if (a->data)
    r.data =
        a->data + (token * a->token_stride_elems + head / a->share * a->head_stride_elems) * gdn_dtype_bytes(a->dtype);
  return r;
}

static inline struct gdn_rows_out gdn_array_rows_out(const struct gdn_array *a, int64_t token, int head) {
  struct gdn_rows_out r = {a->data, a->token_stride_elems, a->dtype};
  if (a->data)
    r.data = a->data + (token * a->token_stride_elems + head * a->head_stride_elems) * gdn_dtype_bytes(a->dtype);
  return r;
}

/* The gates of n tokens of one value head from token on; where they go is left open. */
static inline struct gdn_gates gdn_batch_gates(const struct gdn_batch *b, int64_t token, int head, int n) {
  struct gdn_gates a = {.n = n,
                        .g_mode = b->g_mode,
                        .beta_sigmoid = b->beta_sigmoid,
                        .threshold = b->softplus_threshold,
                        .g = gdn_array_rows(&b->g, token, head),
                        .beta = gdn_array_rows(&b->beta, token, head),
                        .a_log = b->a_log,
                        .dt_bias = b->dt_bias};
  if (a.a_log.data) a.a_log.data = (const char *)a.a_log.data + head * gdn_dtype_bytes(a.a_log.dtype);
  if (a.dt_bias.data) a.dt_bias.data = (const char *)a.dt_bias.data + head * gdn_dtype_bytes(a.dt_bias.dtype);
  return a;
}

/* The state of one value head from column col of V on; null for row -1. */
static inline struct gdn_state_ref gdn_pool_state(const struct gdn_pool *p, const struct gdn_batch *b, int64_t row,
                                                  int head, int col) {
  struct gdn_state_ref s = {.stride_elems = p->k_major ? b->dim_v : b->dim_k, .dtype = p->dtype, .k_major = p->k_major};
  int64_t at = row * p->row_stride_elems + (int64_t)head * b->dim_v * b->dim_k;
  at += (int64_t)col * (p->k_major ? 1 : b->dim_k);
  if (row >= 0) s.data = p->data + at * gdn_dtype_bytes(p->dtype);
  return s;
}

/* ---- validate.c: no allocation but the row set, no writes to anything of the caller ---- */

/* Which sequence writes a row: open addressing, grown by need, kept between calls. */
struct gdn_row_set {
  int64_t *keys; /* row + 1, 0 = free */
  int64_t *seqs;
  int64_t capacity;  /* a power of two, by the call's size: a large batch once must not make later small ones slow */
  int64_t allocated; /* at least capacity */
};

/* pool_name: see struct gdn_batch. */
gdn_status gdn_check_prefill(const gdn_prefill_args *args, const char *pool_name, struct gdn_row_set *set,
                             struct gdn_batch *batch);
/* The part of it that needs no arrays but cu_seqlens. */
gdn_status gdn_check_lengths(const gdn_prefill_args *args, struct gdn_batch *batch);
gdn_status gdn_check_decode(const gdn_decode_args *args, const char *pool_name, struct gdn_row_set *set,
                            struct gdn_batch *batch);
/* Gates of [token][head] into arrays of the same shape; of batch only what gates need is set. */
struct gdn_gating {
  struct gdn_batch batch;
  struct gdn_array g, beta; /* absent where the input is */
};
gdn_status gdn_check_gating(const gdn_gating_args *args, struct gdn_gating *gating);
/* Copies a caller's struct of any size >= min_bytes into dst of dst_bytes: missing fields become 0, fields that this
 * version does not know must be 0. */
gdn_status gdn_check_struct(const void *src, const char *what, size_t min_bytes, void *dst, size_t dst_bytes);

/* ---- unpage.c: paged calls become calls on rows ---- */

/* Counts and dtypes of a table, all that gdn_slots_bytes needs. */
gdn_status gdn_check_table_size(const gdn_page_table *table, struct gdn_pages *pages);
/* And its arrays' pointers and page_size; the arrays' contents are checked when slots are made. */
gdn_status gdn_check_table(const gdn_page_table *table, struct gdn_pages *pages);
/* Memory that slots are made in is aligned and apart from the table's arrays, which are read meanwhile. */
gdn_status gdn_check_slots_memory(const struct gdn_pages *pages, const void *memory, size_t bytes);
gdn_status gdn_make_slots(const struct gdn_pages *pages, void *memory, gdn_slots *slots);
#define GDN_PAGED_POOL "paged.pool" /* the pool_name of the calls they make */
/* memory holds the rows when paged has a table; it is the context's and stays until its next paged call. */
gdn_status gdn_unpage_prefill(const gdn_prefill_args *args, const gdn_paged_args *paged, struct gdn_scratch *memory,
                              gdn_prefill_args *unpaged);
gdn_status gdn_unpage_decode(const gdn_decode_args *args, const gdn_paged_args *paged, struct gdn_scratch *memory,
                             gdn_decode_args *unpaged);

/* ---- plan.c: lengths -> tasks; integers only ---- */

/* A lane is a sequence and a q/k head. Its units are (value head of the group, panel of V), in that order. A task is a
 * range of a lane's units; how many tasks a lane is cut into changes no bit. */
struct gdn_plan {
  int64_t n_tasks;
  int64_t claim; /* tasks that a worker takes at once */
  int grain;
  int n_units;         /* of a lane */
  int n_slots;         /* units of the largest task */
  int64_t n_wide;      /* the first of order, which run in windows and have no tasks */
  int64_t n_order;     /* sequences with tokens */
  int32_t *order;      /* [n_order] sequences, long before short */
  int32_t *parts;      /* [n_order] tasks per lane */
  int64_t *first_task; /* [n_order + 1] */
  int64_t capacity;    /* sequences that the arrays hold */
};

struct gdn_task {
  int64_t seq;
  int head; /* q/k head */
  int unit, n_units;
};

struct gdn_plan_options {
  int n_threads;
  int grain;        /* units of a task come in multiples of it where possible */
  int prep_percent; /* what each task of a lane repeats per token, in percent of one unit's work */
  int schedule;     /* GDN_SCHEDULE_*; LANES: no sequence runs in windows */
};

/* 0 or ENOMEM. */
int gdn_plan_make(struct gdn_plan *plan, const struct gdn_batch *batch, const struct gdn_plan_options *options);
struct gdn_task gdn_plan_task(const struct gdn_plan *plan, int64_t i);
void gdn_plan_free(struct gdn_plan *plan);
/* A sequence in stretches that end where a checkpoint is due. */
struct gdn_span {
  int64_t seq, token, end; /* tokens of the batch, [token, end) */
  int64_t checkpoint;      /* due at end: its index among all checkpoints; -1 = none */
  int64_t stop, n_done;    /* end of the sequence; checkpoints before this stretch */
};

struct gdn_span gdn_span_first(const struct gdn_batch *batch, int64_t seq);
int gdn_span_next(const struct gdn_batch *batch, struct gdn_span *span); /* 0 after the last */
/* Where the chunk that begins at token ends: chunks end at absolute multiples of GDN_CHUNK, or with the sequence. */
int64_t gdn_chunk_end(const struct gdn_batch *batch, int64_t seq, int64_t token);
int64_t gdn_seq_chunks(const struct gdn_batch *batch, int64_t seq);

/* The measured table: which form a tier takes where nobody asks for one. */
int gdn_plan_form(int32_t isa, int dim_k, int dim_v);

/* ---- decode.c: one token on state rows in caller memory ---- */

/* q and k of one token and q/k head, made ready for decode_step; kept while consecutive value heads share them. */
struct gdn_token {
  _Alignas(GDN_ALIGN_BYTES) float q[GDN_DIM_MAX];
  _Alignas(GDN_ALIGN_BYTES) float k[GDN_DIM_MAX];
  _Alignas(GDN_ALIGN_BYTES) float v[GDN_DIM_MAX]; /* then the output */
  float kq;
  int64_t token; /* -1 = nothing made yet */
  int head;
  int far; /* as in gdn_decode_step */
};

/* Whether gdn_token_step takes the batch's pools: both of one dtype and layout. */
int gdn_token_step_fits(const struct gdn_batch *batch);
/* Runs token (of sequence seq) on columns [col, col + n_cols) of value head head_v. */
void gdn_token_step(const struct gdn_kernels *kernels, const struct gdn_batch *batch, struct gdn_token *t, int64_t seq,
                    int64_t token, int head_v, int col, int n_cols);

/* ---- context ---- */

/* Items [next, end) of one worker; others take from it when theirs are done. */
struct gdn_share {
  _Alignas(GDN_ALIGN_BYTES) atomic_llong next;
  int64_t end;
};

#define GDN_N_DIMS (GDN_DIM_MAX / 32)
#define GDN_MAX_TIERS 8

struct gdn_ctx {
  pid_t pid;                /* of the process that made it; a forked child has no workers */
  pthread_mutex_t lock;     /* one call at a time */
  struct gdn_caller caller; /* of the call that runs */
  struct gdn_cpu cpu;
  struct gdn_topo *topo;
  struct gdn_team *team;
  struct gdn_kernels kernels;
  int tier;
  gdn_tier_info tiers[GDN_MAX_TIERS];
  char reasons[GDN_MAX_TIERS][128];
  char placement[256];
  int n_threads, pinned;
  struct gdn_gemms *gemms[GDN_N_DIMS][GDN_N_DIMS]; /* by dim_k / 32 - 1, dim_v / 32 - 1; made on first use */
  uint64_t scratch_limit_bytes;
  struct gdn_scratch *scratch; /* [n_threads] */
  struct gdn_share *shares;    /* [n_threads] */
  struct gdn_row_set row_set;
  struct gdn_scratch shared;       /* windows of a prefill call */
  struct gdn_scratch slots_memory; /* rows of the last paged call that came with a table */
  struct gdn_plan plan;
};

gdn_status gdn_context_make(const gdn_ctx_args *args, gdn_ctx **ctx);
void gdn_context_free(gdn_ctx *ctx);
/* Contexts of this process that are alive or being made. */
int gdn_context_count(void);
/* Gives every worker at least bytes of scratch, and ctx->shared at least shared_bytes; GDN_E_NOMEM leaves outputs
 * untouched since it comes before any work. */
gdn_status gdn_context_reserve(gdn_ctx *ctx, size_t bytes, size_t shared_bytes);
/* The product handles of a pair of head sizes; null when out of memory. */
const struct gdn_gemms *gdn_context_gemms(gdn_ctx *ctx, int dim_k, int dim_v);

/* ---- prefill.c, decode.c ---- */

gdn_status gdn_run_prefill(gdn_ctx *ctx, const struct gdn_batch *batch);
gdn_status gdn_run_decode(gdn_ctx *ctx, const struct gdn_batch *batch);
void gdn_run_gating(gdn_ctx *ctx, const struct gdn_gating *gating); /* gating.c */
/* batch->form, or what the measured table says. */
int gdn_prefill_choose_form(const gdn_ctx *ctx, const struct gdn_batch *batch);

#endif
