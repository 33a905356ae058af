/* SPDX-License-Identifier: Apache-2.0
 * Layer 1: the table of primitives. Maths on plain pointers: no context, no threads, no allocation.
 *
 * One immutable table per tier. A tier starts as a copy of the one below and replaces what it does better, so no
 * entry is ever null. ref.c has every entry in plain C and is the yardstick for the others.
 *
 * To add a primitive: one row in GDN_KERNEL_LIST, its typedef with the contract, the ref version, one check in
 * tests/test_kernels.c. To add a tier's version: the function, named gdn_<primitive>_<tier>, and one line in that
 * tier's fill function. To add a tier: its files and flags in cmake/isa.cmake and its row in table.c.
 *
 * Shapes: n tokens, K = dim_k, V = dim_v, multiples of 32 in 32..256. "Panel": 32 columns of V. The working state is
 * S transposed in panels, [V / 32][K][32] f32, so that a token's update runs along V with no sum across lanes, and
 * one panel fits the first-level cache. Pointers are 64-byte aligned unless the argument is a gdn_rows. */
#ifndef GDN_KERNELS_H
#define GDN_KERNELS_H

#include <stdint.h>

#define GDN_CHUNK 64 /* tokens of a chunk; chunks end at absolute multiples of it */
#define GDN_BLOCK 16 /* rows of a triangular block; a short chunk is padded up to a multiple of it */
#define GDN_PANEL 32 /* columns of a panel */
#define GDN_DIM_MAX 256
#define GDN_TOKENS_MAX 32 /* of one gdn_decode_tokens */
#define GDN_HOT_BYTES (32 << 10)

/* Element types of rows that callers own; the values of gdn.h. */
enum { GDN_ROWS_F32 = 1, GDN_ROWS_BF16 = 2, GDN_ROWS_F16 = 5 };

/* Rows in caller memory: row i starts at data + i * stride elements; no alignment beyond the element's. Elements past
 * the last of a row, and rows past the last, are never touched. */
struct gdn_rows {
  const void *data;
  int64_t stride_elems;
  int32_t dtype;
};

struct gdn_rows_out {
  void *data;
  int64_t stride_elems;
  int32_t dtype;
};

/* dst[n][ld] f32 = src [n][dim]; dim a multiple of 32. */
typedef void gdn_load_rows_fn(int n, int dim, struct gdn_rows src, float *dst, int64_t ld);

/* dst[n][dim] f32 = mult * src (l2norm 0), or mult * src / sqrt(sum(src src) + eps) per row (l2norm 1). */
typedef void gdn_norm_rows_fn(int n, int dim, struct gdn_rows src, int l2norm, float eps, float mult, float *dst);

/* dot[i] = sum_j a[i][j] b[i][j] over rows of dim floats; a row's result does not depend on n. */
typedef void gdn_dot_rows_fn(int n, int dim, const float *a, const float *b, float *dot);

/* What the gates of a call are given as. */
enum {
  GDN_GATE_LOG = 0,   /* g: natural log of the decay */
  GDN_GATE_ALPHA = 1, /* g: the decay itself */
  GDN_GATE_RAW = 2    /* g: a, of which -exp(a_log) softplus(a + dt_bias) is the log of the decay */
};

/* n gates. Rows of one element, f32 or 16 bits; a stride of 0 gives all gates the same element. */
struct gdn_gates {
  int n;
  int g_mode;                     /* GDN_GATE_* */
  int beta_sigmoid;               /* 1: beta is sigmoid of what beta holds */
  int as_log;                     /* 1: g_out is the log of the decay, 0: the decay */
  float threshold;                /* softplus(x) = x above it */
  struct gdn_rows g, beta;        /* null: no decay; beta 1 */
  struct gdn_rows a_log, dt_bias; /* GDN_GATE_RAW; dt_bias null = 0 */
  float *g_out, *beta_out;        /* [n] */
};

/* Makes g_out and beta_out. An element's result does not depend on n or on its place. The decay of log -inf is 0, as is
 * one below the smallest normal number, which would slow every product with it; the log of decay 0 is -inf.
 * Raw gates: infinite a and dt_bias, exp(a_log) and softplus beyond the range count as the largest float, so that no
 * difference and no product of them is NaN; NaN stays NaN. */
typedef void gdn_gates_fn(const struct gdn_gates *a);

/* dst [n][dim] = src[n][ld], rounded to nearest even; dim a multiple of 32. */
typedef void gdn_store_rows_fn(int n, int dim, const float *src, int64_t ld, struct gdn_rows_out dst);

/* Some columns of V of one head's state in caller memory, which has any alignment of its elements. */
struct gdn_state_ref {
  void *data;
  int64_t stride_elems; /* [V, K]: from one column of V to the next; [K, V]: from one element of K to the next */
  int32_t dtype;        /* GDN_ROWS_* */
  int32_t k_major;      /* 0: [V, K], element j of column c at c stride + j; 1: [K, V], at j stride + c */
  int32_t stream;       /* stores may go past the caches: nobody reads the state soon */
};

/* panels [n_cols / 32][dim_k][32] f32 = the state. */
typedef void gdn_state_load_fn(int n_cols, int dim_k, struct gdn_state_ref state, float *panels);
/* And back, rounded to nearest even. */
typedef void gdn_state_store_fn(int n_cols, int dim_k, const float *panels, struct gdn_state_ref state);

/* Cache lines wanted after the call: while token t < n_rows runs, line[i] + t * stride_bytes[i] is prefetched, so that
 * the waits of rows far apart in memory hide behind arithmetic, a few at a time. */
#define GDN_AHEAD_MAX 8
struct gdn_ahead {
  int n, n_rows;
  const char *line[GDN_AHEAD_MAX];
  int64_t stride_bytes[GDN_AHEAD_MAX];
};

/* The recurrent form over n_cols (32, or up to gdn_kernels.recur_cols) columns of one value head's state and n >= 1
 * tokens. Per token, with x = S k and y = S q summed over K in the tier's own fixed order:
 *   d = beta (v - decay x);   out = decay y + kq d;   S = decay S + d k^T
 * These operations and their order are the same in gdn_decode_step_fn of the tier, in any slice of columns and after
 * any split of the tokens: bits must agree, but for the rounding of a stored state. */
struct gdn_recur {
  struct gdn_ahead ahead;
  int n, dim_k, n_cols;
  const float *q, *k; /* [n][dim_k], normalised; q times scale */
  const float *kq;    /* [n], k . q of each token */
  const float *decay; /* [n] */
  const float *beta;  /* [n] */
  const float *v;     /* [n][ld] */
  float *out;         /* [n][ld]; may be v */
  int64_t ld;
  float *state;     /* panels [n_cols / 32][dim_k][32], read and written */
  int no_state;     /* 1: nobody needs the state after the last token, it may be left as it is */
  const char *next; /* a block of memory to be fetched to the second-level cache meanwhile; null = none */
  int64_t next_bytes;
};
typedef void gdn_recur_fn(const struct gdn_recur *a);

/* One token on n_cols (multiple of 32) columns of a state in caller memory, whose elements are written once each. */
struct gdn_decode_step {
  int dim_k, n_cols;
  const float *q, *k; /* [dim_k] */
  float kq, decay, beta;
  const float *v;                 /* [n_cols] */
  float *out;                     /* [n_cols] */
  struct gdn_state_ref state_in;  /* data null = zero state */
  struct gdn_state_ref state_out; /* data null = not stored; may be state_in; of the same dtype, layout and stride */
  int far; /* a hint, 1: fetch further ahead too, as the state is not in a cache that many share */
};
typedef void gdn_decode_step_fn(const struct gdn_decode_step *a);

/* 1 .. GDN_TOKENS_MAX tokens on n_cols (multiple of 32) columns of a [V, K] state in caller memory, which is read
 * once. */
struct gdn_decode_tokens {
  int n, dim_k, n_cols;
  const float *q, *k;                       /* [n][dim_k] */
  const float *kq, *decay, *beta;           /* [n] */
  const float *v;                           /* [n][n_cols] */
  float *out;                               /* [n][n_cols]; may be v */
  struct gdn_state_ref state_in;            /* data null = zero state */
  struct gdn_state_ref state_out;           /* data null = not stored; may be state_in; [V, K] of any dtype */
  const struct gdn_state_ref *token_states; /* [n] the same for the state after each token; null = none is stored */
};
/* If any state is stored: the bits of n gdn_decode_step_fn, but for the rounding of states between them.
 * If none is, sums may be taken on the state S before the first token. With c_ts the product of the decays after token
 * s up to t (c_tt = 1, c_t0 from the first on; products, since a decay may be 0), and d, out summed left to right:
 *   d_t = beta_t (v_t - c_t0 S k_t - sum over s < t of c_ts (k_s . k_t) d_s)
 *   out_t = c_t0 S q_t + sum over s < t of c_ts (k_s . q_t) d_s + kq_t d_t
 * The first token has the bits of gdn_decode_step_fn; the bits of a token depend on no later token and no other column.
 * No term is rounded more than K + 2 n + 4 times, so with r = (K + 2 n + 4) 2^-24 and |a| . |b| for sums of absolute
 * values, the errors e of d and f of out are, up to the order r^2 and unless a product of decays, of two rows or of the
 * state and a row leaves the range of floats,
 *   e_t <= |beta_t| (r (|v_t| + c_t0 |S| . |k_t| + sum c_ts |k_s| . |k_t| |d_s|) + sum c_ts |k_s . k_t| e_s)
 *   f_t <= r (c_t0 |S| . |q_t| + sum c_ts |k_s| . |q_t| |d_s|) + sum c_ts |k_s . q_t| e_s, here over s <= t. */
typedef void gdn_decode_tokens_fn(const struct gdn_decode_tokens *a);

/* ---- chunk form: one chunk of n <= 64 tokens, padded in scratch to n16, the next multiple of 16 ----
 * Per q/k head: chunk_qk. Per value head: chunk_gates, chunk_mask, chunk_solve. Per value head and columns
 * [col, col + n_cols) of V (multiples of 32): chunk_begin once, then per chunk chunk_delta, chunk_out, chunk_state, and
 * chunk_end where the state is wanted. What the operands (void pointers) and l hold is the tier's own affair: below is
 * what they are in f32, chunk_bf16.h says where bf16 tiers keep decays and norms instead; the sizes are upper bounds.
 * G_i = g_0 + .. + g_i inside the chunk. All f32 unless said otherwise. */
struct gdn_gemms; /* gemm.h: product handles for one dim_k and dim_v */

struct gdn_chunk {
  int n, n16, dim_k, dim_v;
  int l2norm;
  float scale, eps;
  const struct gdn_gemms *gemms;
  /* q/k head */
  struct gdn_rows q_rows, k_rows;
  void *q, *k;    /* operands, [64][K] f32 at most */
  void *kt;       /* operand k transposed, [K][64] f32 at most */
  float *kk, *qk; /* [64][64] k_i . k_j and q_i . k_j, blocks on and below the diagonal */
  void *qk_op;    /* operand q_i . k_j, j <= i, else 0, [64][64] bf16; bf16 tiers only */
  /* value head */
  struct gdn_rows g_rows, beta_rows; /* data may be null */
  float *gate_hi, *gate_lo;          /* [64] G_i as a sum of two floats; each g is first raised to at least -110 */
  float *decay_in;                   /* [64] exp(G_i) */
  float *decay_out;                  /* [64] exp(G_(n-1) - G_i); 0 from n on */
  float *beta;                       /* [64]; 0 from n on */
  float *decay_all;                  /* [1] exp(G_(n-1)) */
  float *l;               /* [64][64] beta_i exp(G_i - G_j) kk_ij strictly below the diagonal, else 0 inside blocks */
  void *a;                /* operand exp(G_i - G_j) qk_ij, j <= i < n, else 0; [64][64] f32 at most */
  void *t;                /* operand (I + L)^-1; [64][64] f32 at most */
  float *q_mult, *k_mult; /* [64] row factors that a bf16 tier keeps apart from its exact operands q, k, kt */
  float *decay;           /* [64] exp(g_i); bf16 tiers only */
  int *steep;             /* [1] 1: exp(G_i) leaves the range in which a row of V' can carry it; bf16 tiers only */
  /* the chunk after this one, to be prefetched; next_n 0 = none */
  int next_n;
  struct gdn_rows next_q, next_k, next_v;
  void *hot; /* [GDN_HOT_BYTES] what passes inside one primitive: small, so that it stays in the first-level cache */
  /* columns of V */
  struct gdn_rows v_rows; /* row i: v of token i, all of V */
  struct gdn_rows_out out_rows;
  int zero_state;   /* 1: the state is zero, whatever state and state_op hold; tiers with knows_zero only */
  float *state;     /* panels of all of V; what it holds between chunk_begin and chunk_end is the tier's affair */
  void *state_op;   /* operand of the state; [K][V] f32 at most */
  void *resid;      /* operand beta (v - exp(G) K S^T); [64][V] f32 at most */
  float *inter;     /* [64][V] scratch of chunk_out and chunk_state_at */
  float *delta_f32; /* [64][V] V' = T resid, rows up to n16; null where nobody needs it beside the operands */
  void *delta;      /* operand V' */
  void *delta_out;  /* operand exp(G_(n-1) - G) V' */
};

/* Reads q_rows and k_rows; makes q (with scale), k, kt, kk, qk, and in bf16 tiers qk_op, q_mult and k_mult. Rows
 * n .. n16 - 1 become zero. */
typedef void gdn_chunk_qk_fn(const struct gdn_chunk *c);
/* Makes gate_hi .. decay_all, or decay .. steep, from g_rows and beta_rows. -inf is a valid g; NaN stays NaN. */
typedef void gdn_chunk_gates_fn(const struct gdn_chunk *c);
/* Makes l and a from kk, qk and gates, bf16 tiers in steep chunks only; always the exponential of a difference that is
 * summed from the gates between, or the product of theirs. */
typedef void gdn_chunk_mask_fn(const struct gdn_chunk *c);
/* Makes t from l, or where that was not made from kk, in f32. */
typedef void gdn_chunk_solve_fn(const struct gdn_chunk *c);
/* Makes state_op from state, which may go stale from here on. */
typedef void gdn_chunk_begin_fn(const struct gdn_chunk *c, int col, int n_cols);
/* Brings state up to date from state_op, which stays. */
typedef void gdn_chunk_end_fn(const struct gdn_chunk *c, int col, int n_cols);
/* Makes the residual from k, state_op, v_rows and gates, and of it with t delta (and delta_f32; and delta_out, where
 * the state takes V' in another form than the output). */
typedef void gdn_chunk_delta_fn(const struct gdn_chunk *c, int col, int n_cols);
/* Writes out_rows = exp(G) q S + a V'. */
typedef void gdn_chunk_out_fn(const struct gdn_chunk *c, int col, int n_cols);
/* state_op of the decayed state and V'^T k. */
typedef void gdn_chunk_state_fn(const struct gdn_chunk *c, int col, int n_cols);

/* panels [n_cols / 32][K][32] = the state after the chunk's first n_at tokens, from the one before and the rows of V'
 * up to there: called after chunk_out, before chunk_state, which it leaves undisturbed. May use inter. */
typedef void gdn_chunk_state_at_fn(const struct gdn_chunk *c, int n_at, int col, int n_cols, float *panels);

/* Around all work of one thread in one prefill: what the tier needs set in the thread, and its way back. Decode has no
 * products that need it. */
typedef uint32_t gdn_thread_begin_fn(void);
typedef void gdn_thread_end_fn(uint32_t saved);

#define GDN_KERNEL_LIST(X)                                                                                             \
  X(load_rows)                                                                                                         \
  X(norm_rows)                                                                                                         \
  X(dot_rows)                                                                                                          \
  X(gates)                                                                                                             \
  X(store_rows)                                                                                                        \
  X(state_load)                                                                                                        \
  X(state_store)                                                                                                       \
  X(recur)                                                                                                             \
  X(decode_step)                                                                                                       \
  X(decode_tokens)                                                                                                     \
  X(chunk_qk)                                                                                                          \
  X(chunk_gates)                                                                                                       \
  X(chunk_mask)                                                                                                        \
  X(chunk_solve)                                                                                                       \
  X(chunk_begin)                                                                                                       \
  X(chunk_end)                                                                                                         \
  X(chunk_delta)                                                                                                       \
  X(chunk_out)                                                                                                         \
  X(chunk_state)                                                                                                       \
  X(chunk_state_at)                                                                                                    \
  X(thread_begin)                                                                                                      \
  X(thread_end)

struct gdn_kernels {
  const char *tier;
  int chunk_min;  /* a chunk with fewer tokens takes the recurrent form even in chunk form; 1 = none does */
  int knows_zero; /* 1: heeds gdn_chunk.zero_state, and needs no zeros in memory where a sequence starts */
  int scan_cols;  /* columns that go from chunk_delta to chunk_state together */
  int recur_cols; /* columns of one gdn_recur call that the tier likes best: 32 or 64 */
#define GDN_KERNEL_FIELD(name) gdn_##name##_fn *name;
  GDN_KERNEL_LIST(GDN_KERNEL_FIELD)
#undef GDN_KERNEL_FIELD
};

/* One per file; called in tier order, each overwrites what its file does better. */
void gdn_fill_recur_ref(struct gdn_kernels *t);
void gdn_fill_chunk_ref(struct gdn_kernels *t);
#ifdef GDN_HAVE_AVX2
void gdn_fill_recur_avx2(struct gdn_kernels *t);
void gdn_fill_chunk_avx2(struct gdn_kernels *t);
#endif
#ifdef GDN_HAVE_AVX512
void gdn_fill_recur_avx512(struct gdn_kernels *t);
void gdn_fill_chunk_avx512(struct gdn_kernels *t);
#endif
#ifdef GDN_HAVE_AVX512BF16
void gdn_fill_chunk_avx512bf16(struct gdn_kernels *t);
#endif
#ifdef GDN_HAVE_AMX
void gdn_fill_chunk_amx(struct gdn_kernels *t);
#endif

/* table.c: the tiers of this build, lowest first. */
struct gdn_tier {
  const char *name;
  int32_t isa;                         /* GDN_ISA_* */
  uint32_t cpu_flags;                  /* GDN_CPU_* it needs */
  void (*fill)(struct gdn_kernels *t); /* null: this build has no such tier (the compiler could not build it) */
};
extern const struct gdn_tier gdn_tiers[];
extern const int gdn_n_tiers;
/* Fills t with tier i: every tier up to i in order, by functions that may use its instructions. */
void gdn_kernels_fill(struct gdn_kernels *t, int tier);

#endif
