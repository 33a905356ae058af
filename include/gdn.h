/* SPDX-License-Identifier: Apache-2.0
 * libgdn: Gated DeltaNet linear attention on x86-64 CPUs, chunked prefill and decode.
 * The whole public interface. Depends on nothing but <stddef.h> and <stdint.h>; C99 and C++.
 *
 * The rule. Every value head has a state S [dim_v][dim_k]. For each token t
 *     S = exp(g_t) S;   d = beta_t (v_t - S k_t);   S = S + d k_t^T;   o_t = scale S q_t
 * with S starting at zero or at a stored state. Source: arXiv 2412.06464 (gated delta rule) and
 * arXiv 2406.06484 (chunk form).
 *
 * Conventions, valid for every call:
 *   - Shapes are in brackets, row-major, outermost first. Strides and sizes named _elems count elements.
 *   - Zero means default: an argument struct set to {0} needs only the fields the caller cares about.
 *     The first field of an argument struct is its size, sizeof(struct), so that fields can be added.
 *   - Every call returns a gdn_status, GDN_OK or a negative error. gdn_last_error() then names the argument
 *     and the value. After an error no output byte has been written.
 *   - Arrays are borrowed until the call returns. The library keeps no pointer to them.
 *   - Calls on one context may come from several threads; they run one after the other. Different contexts
 *     run side by side. Nothing is printed, nothing aborts.
 */
#ifndef GDN_H
#define GDN_H

#include <stddef.h>
#include <stdint.h>

#define GDN_VERSION_MAJOR 0
#define GDN_VERSION_MINOR 1
#define GDN_VERSION_PATCH 0
/** The version as one number that compares in order: 1.2.3 is 0x010203. */
#define GDN_VERSION ((GDN_VERSION_MAJOR << 16) | (GDN_VERSION_MINOR << 8) | GDN_VERSION_PATCH)

#if defined(__GNUC__)
#define GDN_API __attribute__((visibility("default")))
#else
#define GDN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Result of a call: GDN_OK or one of the errors below. */
typedef int32_t gdn_status;

enum {
  GDN_OK = 0,
  GDN_E_NULL = -1,          /* a required pointer is null */
  GDN_E_STRUCT_SIZE = -2,   /* struct_size is smaller than the first version of the struct, or absurd */
  GDN_E_FLAGS = -3,         /* a flag this version does not know */
  GDN_E_OPTION = -4,        /* an enumerated option (form, isa, pin, GDN_ISA) has an unknown value */
  GDN_E_DTYPE = -5,         /* an element type that this argument does not take */
  GDN_E_SIZE = -6,          /* a count that is negative or too large */
  GDN_E_DIM = -7,           /* dim_k or dim_v is not a multiple of 32 in 32..256 */
  GDN_E_HEADS = -8,         /* head counts below 1, or counts that do not go together */
  GDN_E_STRIDE = -9,        /* a stride that is negative or makes elements overlap */
  GDN_E_LENGTHS = -10,      /* cu_seqlens does not start at 0, decreases, or does not end at n_tokens */
  GDN_E_ROW = -11,          /* a state row outside its pool */
  GDN_E_ROW_CONFLICT = -12, /* a row written twice, or read by one sequence and written by another */
  GDN_E_ALIAS = -13,        /* an output overlaps an input or another output */
  GDN_E_VALUE = -14,        /* a number out of its range: scale not finite, eps negative or not finite */
  GDN_E_NOMEM = -15,        /* memory could not be had; nothing was written */
  GDN_E_THREADS = -16,      /* the context's threads could not be started */
  GDN_E_FORK = -17,         /* the context was made before a fork, in the parent process */
  GDN_E_PAGE = -18,         /* a page id outside the pool, or twice in one sequence */
  GDN_E_CPUS = -19          /* a cpu list or NUMA node that is malformed, empty, or not the process's to use */
};

/** Element types. */
enum {
  GDN_DTYPE_DEFAULT = 0, /* the type named first in the argument's comment */
  GDN_F32 = 1,
  GDN_BF16 = 2,
  GDN_I32 = 3,
  GDN_I64 = 4,
  GDN_F16 = 5
};

/** Instruction-set tiers, lowest first. */
enum {
  GDN_ISA_DEFAULT = 0,    /* the highest that processor, system and build offer */
  GDN_ISA_REF = 1,        /* plain C */
  GDN_ISA_AVX2 = 2,       /* AVX2 and FMA */
  GDN_ISA_AVX512 = 3,     /* AVX-512 F, BW, DQ and VL */
  GDN_ISA_AVX512BF16 = 4, /* and AVX512_BF16: matrix products of the chunk form in bf16 */
  GDN_ISA_AMX = 5         /* and AMX_TILE, AMX_BF16: the same on tiles */
};

/** How prefill computes; see gdn_prefill. */
enum {
  GDN_FORM_DEFAULT = 0,   /* chosen from the tier and the head sizes by a measured table */
  GDN_FORM_RECURRENT = 1, /* token by token, one pass over a slice of the state per token */
  GDN_FORM_CHUNK = 2      /* matrix products over chunks of 64 tokens */
};

/** How prefill in chunk form spreads over the workers; changes no bit of any result. */
enum {
  GDN_SCHEDULE_DEFAULT = 0, /* windows for sequences with a lane of more than half an even share of the work */
  GDN_SCHEDULE_LANES = 1,   /* a worker runs a sequence's q/k head from first to last chunk */
  GDN_SCHEDULE_WINDOWS = 2  /* all workers share each sequence, window by window of chunks, while the sequences' q/k
                               heads number 64, or 4 a worker, at most; the rest run as lanes */
};

/** Whether a context binds each worker to a core of its own. */
enum {
  GDN_PIN_DEFAULT = 0, /* as GDN_PIN_ON */
  GDN_PIN_ON = 1,
  GDN_PIN_OFF = 2 /* workers move freely within the cpus of the context's place */
};

/** Which cpus a context's workers use. */
enum {
  GDN_PLACE_DEFAULT = 0,  /* those of the affinity mask of the thread that calls gdn_ctx_create */
  GDN_PLACE_CPU_LIST = 1, /* those of cpu_list, also outside that mask, but inside the process's cpuset */
  GDN_PLACE_NUMA_NODE = 2 /* those of the mask that belong to numa_node */
};

/** Flags of gdn_prefill_args and gdn_decode_args. */
enum {
  GDN_L2NORM_QK = 1u << 0, /* use x / sqrt(sum(x x) + eps) for every row x of q and k */
  GDN_LINEAR_G = 1u << 1   /* g holds the decay itself, 0 or more (alpha), instead of its natural log */
};

/** How a head's state lies in memory. */
enum {
  GDN_LAYOUT_DEFAULT = 0, /* as GDN_LAYOUT_VK */
  GDN_LAYOUT_VK = 1,      /* [dim_v][dim_k] */
  GDN_LAYOUT_KV = 2       /* [dim_k][dim_v] */
};

/** The version of the library that is loaded, in the form of GDN_VERSION. Any thread. */
GDN_API uint32_t gdn_version(void);

/** The same as text, "0.1.0"; static storage. Any thread. */
GDN_API const char *gdn_version_string(void);

/** The name of a status, "GDN_E_ROW"; static storage, never null. Any thread. */
GDN_API const char *gdn_status_name(gdn_status status);

/** What went wrong in this thread's last call that returned an error: argument, value and what was expected.
 *  The text is this thread's own and stays until its next error; "" before the first. */
GDN_API const char *gdn_last_error(void);

/* ---- context ---- */

/** Threads, placement, tables of kernels and scratch memory: everything that outlives a call. */
typedef struct gdn_ctx gdn_ctx;

typedef struct gdn_ctx_args {
  size_t struct_size;
  int32_t n_threads;    /* workers; 0 = one per physical core of the place, or fewer where a cgroup's cpu quota pays for
                        fewer. More workers than cores use the cores' other hardware threads, then take turns. */
  int32_t isa;          /* GDN_ISA_*: the highest tier to use, also capped by the environment variable GDN_ISA
                        ("ref", "avx2", "avx512", "avx512bf16", "amx"); what the machine lacks is skipped */
  int32_t pin;          /* GDN_PIN_* */
  int32_t place;        /* GDN_PLACE_* */
  const char *cpu_list; /* with GDN_PLACE_CPU_LIST, else null: cpu numbers as Linux writes them, "0-3,8" */
  int32_t numa_node;    /* with GDN_PLACE_NUMA_NODE, else 0: the system's number of the node */
  int32_t reserved;     /* 0 */
  uint64_t scratch_limit_bytes; /* most scratch memory of all workers together; 0 = no limit. A call that needs more
                                   gets GDN_E_NOMEM and writes nothing. */
} gdn_ctx_args;

/** Makes a context and starts its workers.
 *  args may be null for all defaults. *ctx is set on success only and belongs to the caller, who ends it with
 *  gdn_ctx_destroy. Any thread. A system that refuses to tell the topology or to bind threads (hidden /sys, seccomp)
 *  is no error: the workers then run unbound, and gdn_info says why.
 *  What no call changes for the thread that calls: affinity, OpenMP settings, signal mask, floating-point control and
 *  status, errno. Workers block all signals but those of faults.
 *  Errors: GDN_E_NULL (ctx), GDN_E_STRUCT_SIZE, GDN_E_SIZE (n_threads), GDN_E_OPTION (isa, pin, place, GDN_ISA;
 *  cpu_list or numa_node without their place), GDN_E_CPUS, GDN_E_NOMEM, GDN_E_THREADS. */
GDN_API gdn_status gdn_ctx_create(const gdn_ctx_args *args, gdn_ctx **ctx);

/** Ends the workers and frees everything. Null is allowed. No other call on ctx may be running or follow.
 *  In a child process after fork it frees nothing and returns at once. */
GDN_API void gdn_ctx_destroy(gdn_ctx *ctx);

/** One tier as seen at gdn_ctx_create. */
typedef struct gdn_tier_info {
  const char *name;  /* "ref", "avx2", ... */
  int32_t available; /* 1 if this context could use it */
  int32_t reserved;
  const char *reason; /* why not: "processor lacks avx512bw", "capped by GDN_ISA=avx2"; "" if available */
} gdn_tier_info;

/** What a context runs on. Strings and arrays belong to the context and live as long as it does. */
typedef struct gdn_info {
  size_t struct_size;
  const char *cpu;            /* processor name */
  const char *isa;            /* chosen tier */
  const gdn_tier_info *tiers; /* [n_tiers], lowest first */
  int32_t n_tiers;
  int32_t n_threads;            /* workers */
  int32_t n_cores;              /* physical cores of the context's place */
  int32_t pinned;               /* 1 if every worker is bound to its core */
  const char *placement;        /* the cpus that workers are bound to, or why they are not bound; and in brackets what
                                   of the machine could not be learnt */
  const char *product_provider; /* who computes the chunk form's matrix products: "libxsmm" or "own" */
  const char *libxsmm_version;  /* version built against, "none" without */
  uint64_t scratch_bytes;       /* scratch memory now held by all workers */
} gdn_info;

/** Tells what ctx runs on. The caller sets info->struct_size; fields beyond it are not written.
 *  Errors: GDN_E_NULL, GDN_E_STRUCT_SIZE, GDN_E_FORK. Any thread. */
GDN_API gdn_status gdn_ctx_info(gdn_ctx *ctx, gdn_info *info);

/** Runs fn(arg, worker, n_workers) once on every worker of ctx, worker in 0 .. n_workers - 1, and returns when all
 *  have returned: to first-touch memory where it will be used, or to measure on the threads that calls use.
 *  fn must not call into the same ctx. Errors: GDN_E_NULL, GDN_E_FORK. */
GDN_API gdn_status gdn_ctx_run(gdn_ctx *ctx, void (*fn)(void *arg, int32_t worker, int32_t n_workers), void *arg);

/* ---- arrays ---- */

/** An input [token][head][dim], or [token][head] for gates, inside whatever the caller holds: elements of the
 *  innermost dimension are adjacent, tokens and heads are apart by strides (for slices of a fused projection).
 *  A stride of 0 means dense. */
typedef struct gdn_tensor {
  const void *data;
  int64_t token_stride_elems;
  int64_t head_stride_elems;
  int32_t dtype;    /* GDN_DTYPE_DEFAULT or one that the argument's comment names */
  int32_t reserved; /* 0 */
} gdn_tensor;

/** An output of the same form. */
typedef struct gdn_tensor_out {
  void *data;
  int64_t token_stride_elems;
  int64_t head_stride_elems;
  int32_t dtype;
  int32_t reserved; /* 0 */
} gdn_tensor_out;

/** Recurrent states: data [n_rows][n_heads][dim_v][dim_k] or [n_rows][n_heads][dim_k][dim_v], n_heads = n_heads_v (or
 *  n_heads_q if there are more of these), each row one dense block, rows apart by row_stride_elems (0 = dense; 64-bit,
 *  a pool may exceed 4 GiB). With rows, sequence i uses row rows[i]; without, row i, and n_rows is at least n_seqs.
 *  Whatever the dtype, arithmetic is float32; a state is rounded once, to nearest even, when a call stores it. Over
 *  4096 decode steps, each stored, out and state drift from float64 by 1.6e-2 (bf16) or 2e-3 (f16) relative L2,
 *  measured with K = V = 64 and decays from exp(-1e-4) on; float32 states by 6e-7 over 16384. */
typedef struct gdn_states {
  void *data;
  int64_t n_rows;
  int64_t row_stride_elems;
  const void *rows;   /* [n_seqs], or null */
  int32_t rows_dtype; /* GDN_I32 or GDN_I64 */
  int32_t dtype;      /* GDN_F32 (default), GDN_BF16 or GDN_F16, whose largest number is 65504 */
  int32_t layout;     /* GDN_LAYOUT_* */
  int32_t reserved;   /* 0 */
} gdn_states;

/** Gates as a model's projections give them, in place of g and beta: for head h of token t
 *      log decay = -exp(a_log[h]) softplus(a[t][h] + dt_bias[h]),   beta = sigmoid(b[t][h])
 *  computed in float32; softplus(x) = x above softplus_threshold. a and b may be given one without the other, the other
 *  gate then comes from g or beta or is absent. Each array is float32, bfloat16 or float16.
 *  No value but NaN gives NaN: infinities of a and dt_bias, and exp(a_log) beyond the range, count as the largest
 *  float. So a or dt_bias of -inf, and a_log of -inf, mean no decay; a_log of inf forgets everything if softplus is
 *  above 0. */
typedef struct gdn_raw_gates {
  gdn_tensor a;             /* [n_tokens][n_heads], absent = g is used */
  gdn_tensor b;             /* [n_tokens][n_heads], absent = beta is used */
  const void *a_log;        /* [n_heads], with a */
  const void *dt_bias;      /* [n_heads], absent = 0 */
  int32_t a_log_dtype;      /* GDN_F32 (default), GDN_BF16 or GDN_F16 */
  int32_t dt_bias_dtype;    /* likewise */
  float softplus_threshold; /* 0 = 20 */
  int32_t reserved;         /* 0 */
} gdn_raw_gates;

/* ---- prefill ---- */

typedef struct gdn_prefill_args {
  size_t struct_size;
  uint32_t flags;            /* GDN_L2NORM_QK or 0 */
  int32_t form;              /* GDN_FORM_* */
  int64_t n_seqs;            /* sequences packed in the batch, 0 or more */
  int64_t n_tokens;          /* tokens of all sequences together */
  int32_t n_heads_k;         /* k heads, H, and q heads unless n_heads_q says otherwise */
  int32_t n_heads_v;         /* value heads, Hv, a multiple of H: value head h uses q/k head h / (Hv / H) */
  int32_t dim_k;             /* K: a multiple of 32 in 32..256 */
  int32_t dim_v;             /* V: likewise, need not equal K */
  float scale;               /* on q; 0 = 1 / sqrt(dim_k) */
  float eps;                 /* of the L2 norm; 0 = 1e-6 */
  const void *cu_seqlens;    /* [n_seqs + 1]: sequence i holds tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 */
  int32_t cu_seqlens_dtype;  /* GDN_I32 or GDN_I64 */
  int32_t schedule;          /* GDN_SCHEDULE_*, for measuring; the recurrent form has one schedule only */
  gdn_tensor q;              /* [n_tokens][n_heads_k][dim_k] bf16, f16 or f32 */
  gdn_tensor k;              /* [n_tokens][n_heads_k][dim_k] bf16, f16 or f32 */
  gdn_tensor v;              /* [n_tokens][n_heads_v][dim_v] bf16, f16 or f32 */
  gdn_tensor g;              /* [n_tokens][n_heads_v] f32, natural log of the decay; absent (data null) = 0 */
  gdn_tensor beta;           /* [n_tokens][n_heads_v] f32, bf16 or f16; absent = 1 */
  gdn_tensor_out out;        /* [n_tokens][n_heads_v][dim_v] bf16, f16 or f32 */
  gdn_states initial_state;  /* read; absent (data null) or row -1 = zero state, whose row is not read */
  gdn_states final_state;    /* written; absent or row -1 = not stored */
  const void *prefix_lens;   /* [n_seqs] tokens that each sequence has processed before this call; absent = 0 */
  int32_t prefix_lens_dtype; /* GDN_I32 or GDN_I64 */
  int32_t checkpoint_cu_starts_dtype; /* GDN_I32 or GDN_I64 */
  int64_t checkpoint_every_n_tokens;  /* N: a checkpoint after each token that makes a sequence's length, prefix
                                         included, a multiple of N; 0 = none */
  const void *checkpoint_cu_starts;   /* [n_seqs + 1] from 0: sequence i has (prefix + len) / N - prefix / N of them */
  gdn_states checkpoints;  /* written: the j-th of sequence i to rows[checkpoint_cu_starts[i] + j], or to that row
                               without rows; row -1 skips it */
  int32_t n_heads_q;       /* q heads, 0 = n_heads_k. More than n_heads_k: a multiple of it, and n_heads_k = n_heads_v;
                               then every q head has its own state, gates and output (g, beta, out and states have
                               n_heads_q heads) and q head h uses k and v head h / (n_heads_q / n_heads_k) */
  int32_t reserved_2;      /* 0 */
  gdn_raw_gates raw_gates; /* instead of g, beta or both */
} gdn_prefill_args;

/** Runs the rule over a packed batch of sequences of any lengths, from initial to final states.
 *  Shapes, types and defaults stand at the fields above.
 *  q, k, v, out and each pool may have a type of their own.
 *  g is at most 0 for a decaying state; -inf forgets everything before the token. Positive g is computed as
 *  written (the state grows). NaN in a sequence's inputs reaches that sequence's outputs only.
 *  The chunk form of tiers avx512bf16 and amx has less range than float32, for which take the recurrent form: it wants
 *  v and states, also over the norm of k where GDN_L2NORM_QK divides by it (with eps), of a size between 2^-60 and 2^60
 *  or zero, norms of q and k between 2^-20 and 2^20 or zero, and no stretch of a chunk over which g sums to more than
 *  40. Beyond that, numbers may count as zero or results become inf or NaN.
 *  Length 0: the sequence writes nothing, also no final state.
 *  prefix_lens place a sequence's chunks, which end at absolute multiples of 64, and its checkpoints. Asking for
 *  checkpoints changes no other bit.
 *  Aliasing: initial_state, final_state and checkpoints may be one pool. Then a row may be read and written by the same
 *  sequence, and read by many; it may not be written twice, nor read by one sequence and written by another. Only the
 *  checkpoint at a sequence's very end may share its row with the final state.
 *  Every other overlap of an output with an input or output is an error.
 *  Alignment: that of the element type; states 64 bytes apart are fastest.
 *  Results: bitwise the same for any number of threads, any batch that a sequence is packed into, and any split of a
 *  sequence over calls at a multiple of 64 (with its prefix_lens); in recurrent form for a split anywhere, and n calls
 *  of gdn_decode give the bits of a prefill of n.
 *  Arithmetic is float32 in the tiers ref, avx2 and avx512; they differ from each other by rounding.
 *  Scratch does not grow with n_tokens; memory for row checks grows with n_seqs and checkpoints.
 *  Errors: GDN_E_NULL, _STRUCT_SIZE, _FLAGS, _OPTION, _DTYPE, _SIZE, _DIM, _HEADS, _STRIDE, _LENGTHS, _ROW,
 *  _ROW_CONFLICT, _ALIAS, _VALUE, _NOMEM, _FORK; the text names argument and value. */
GDN_API gdn_status gdn_prefill(gdn_ctx *ctx, const gdn_prefill_args *args);

/** Tells the form, GDN_FORM_RECURRENT or GDN_FORM_CHUNK, that gdn_prefill would take for these args.
 *  Checks args as gdn_prefill does, reads no tokens and writes *form only. Errors: those of gdn_prefill. */
GDN_API gdn_status gdn_prefill_form(gdn_ctx *ctx, const gdn_prefill_args *args, int32_t *form);

/* ---- decode ---- */

#define GDN_DECODE_TOKENS_MAX 32

typedef struct gdn_decode_args {
  size_t struct_size;
  uint32_t flags;    /* GDN_L2NORM_QK, GDN_LINEAR_G */
  int32_t n_tokens;  /* T, tokens of each sequence: 0 = 1, at most GDN_DECODE_TOKENS_MAX. Token t of sequence i is
                          token i T + t of the arrays */
  int64_t n_seqs;    /* sequences, 0 or more */
  int32_t n_heads_k; /* as in gdn_prefill_args */
  int32_t n_heads_v;
  int32_t dim_k;
  int32_t dim_v;
  float scale;
  float eps;
  gdn_tensor q;               /* [n_seqs T][n_heads_k][dim_k] bf16, f16 or f32; may be absent if out is */
  gdn_tensor k;               /* [n_seqs T][n_heads_k][dim_k] bf16, f16 or f32 */
  gdn_tensor v;               /* [n_seqs T][n_heads_v][dim_v] bf16, f16 or f32 */
  gdn_tensor g;               /* [n_seqs T][n_heads_v] f32, natural log; absent = 0 */
  gdn_tensor beta;            /* [n_seqs T][n_heads_v] f32, bf16 or f16; absent = 1 */
  gdn_tensor_out out;         /* [n_seqs T][n_heads_v][dim_v] bf16, f16 or f32; absent = only states are wanted */
  gdn_states initial_state;   /* read; absent or row -1 = zero state */
  gdn_states final_state;     /* written; absent or row -1 = not stored; may be the same pool, also in place */
  const void *token_counts;   /* [n_seqs] the first n of a sequence's T tokens count, 0 <= n <= T; absent = T. A
                               sequence of 0 reads and writes nothing */
  int32_t token_counts_dtype; /* GDN_I32 or GDN_I64 */
  int32_t n_heads_q;          /* as in gdn_prefill_args */
  gdn_states token_states;    /* written: the state after token t of sequence i to rows[i T + t], or to row i T + t
                                 without rows; row -1 skips it; absent = none */
  gdn_raw_gates raw_gates;    /* as in gdn_prefill_args */
} gdn_decode_args;

/** T tokens, mostly one, for each of n_seqs sequences: reads every state row once and writes it once.
 *  Everything else as for gdn_prefill, whose recurrent form gives the same bits, with one exception: where a sequence
 *  of several tokens stores no state, neither final_state nor any of token_states, outputs of its later tokens may be
 *  summed in another order. They then differ from the rule, applied to rows as normalised and gates as float32, by at
 *  most (K + 2 T + 4) 2^-24 of the sum of absolute values of the terms that make them (initial state times q, and v and
 *  earlier corrections by products of keys), plus what the same share of earlier corrections contributes, while no
 *  product leaves the range of floats; its first token, and all that commit stores, have the bits of single steps, and
 *  no bit depends on threads, batch or later tokens.
 *  Speculative decoding: verify T drafted tokens without final_state, which leaves the states as they are; then commit
 *  the n accepted ones by the same call with token_counts n, final_state, and no out (the same arrays otherwise). Or
 *  let verify store the state after each token in rows of token_states, and take the accepted one's row from then on.
 *  token_states follows the rules of checkpoints: its rows and those of final_state are all different, but for the
 *  state after a sequence's last token, whose row may be that of the final state. */
GDN_API gdn_status gdn_decode(gdn_ctx *ctx, const gdn_decode_args *args);

/* ---- gates ---- */

typedef struct gdn_gating_args {
  size_t struct_size;
  int64_t n_tokens;
  int32_t n_heads;
  int32_t reserved;        /* 0 */
  gdn_raw_gates raw_gates; /* a, b or both */
  gdn_tensor_out g;        /* [n_tokens][n_heads] f32, natural log of the decay; with a */
  gdn_tensor_out beta;     /* [n_tokens][n_heads] f32; with b */
} gdn_gating_args;

/** Makes log decay and beta from raw gates, for engines that want them as arrays; see gdn_raw_gates. The values are
 *  those that gdn_prefill and gdn_decode compute from raw_gates, so that both ways give the same bits.
 *  Errors: GDN_E_NULL, _STRUCT_SIZE, _SIZE, _HEADS, _DTYPE, _STRIDE, _ALIAS, _VALUE, _FORK. */
GDN_API gdn_status gdn_gating(gdn_ctx *ctx, const gdn_gating_args *args);

/* ---- paged states ----
 * The caller owns a pool of state rows and gives every sequence a list of pages, as for a paged key/value cache. Page j
 * of a sequence holds the state after the last token of that page, so that a request whose prefix is cached continues
 * from the last shared page. Source: FlashInfer, gdn_paged. */

/** Which pages the sequences of a batch own. Sequence i owns page_indices[page_indptr[i]] .. page_indices[
 *  page_indptr[i + 1] - 1], at least one, any ids in any order, and has (pages - 1) * page_size + last_page_len[i]
 *  tokens after the call. The call's new tokens are the last of these, the ones before them are the prefix. */
typedef struct gdn_page_table {
  size_t struct_size;
  int64_t n_seqs;
  int64_t n_pages;           /* rows of the pool; page ids are 0 .. n_pages - 1, there is no padding id */
  int64_t page_size;         /* tokens of a page: a positive multiple of 64, below 2^31 */
  int64_t n_page_indices;    /* length of page_indices */
  const void *page_indices;  /* [n_page_indices] */
  const void *page_indptr;   /* [n_seqs + 1] */
  const void *last_page_len; /* [n_seqs], 1 .. page_size */
  const void *cu_seqlens;    /* [n_seqs + 1] the new tokens of prefill; null = decode, one new token each; not read by
                                gdn_prefill_paged and gdn_decode_paged, which know their tokens */
  const void *prefix_lens;   /* [n_seqs] or null: tokens before the call as the caller counts them, to be compared */
  int32_t index_dtype;       /* of the five arrays: GDN_I32 (default) or GDN_I64 */
  int32_t reserved;          /* 0 */
} gdn_page_table;

/** Pool rows of a batch: what gdn_prefill and gdn_decode need, made once per step and used by every layer's call.
 *  The arrays lie in the memory given to gdn_paged_slots. */
typedef struct gdn_slots {
  size_t struct_size;
  int64_t n_seqs;
  int64_t n_tokens; /* new tokens */
  int64_t n_checkpoints;
  int64_t page_size;
  const int64_t *read_rows;            /* [n_seqs] -1 = start from zero */
  const int64_t *write_rows;           /* [n_seqs] -1 = nothing to store: no new tokens */
  const int64_t *prefix_lens;          /* [n_seqs] */
  const int64_t *checkpoint_cu_starts; /* [n_seqs + 1] */
  const int64_t *checkpoint_rows;      /* [n_checkpoints] page boundaries crossed before the last page */
} gdn_slots;

/** Tells how many bytes gdn_paged_slots needs for a table; depends on n_seqs and n_page_indices only, so memory for the
 *  largest batch serves all. *bytes is set on success. Any thread.
 *  Errors: GDN_E_NULL, GDN_E_STRUCT_SIZE, GDN_E_SIZE. */
GDN_API gdn_status gdn_paged_slots_bytes(const gdn_page_table *table, size_t *bytes);

/** Checks a page table and makes the rows of its batch.
 *  Prefill (cu_seqlens given): the initial state is read from the page that holds the last prefix token, or is zero for
 *  an empty prefix. Each page boundary that the new tokens cross stores its state in the page that ends there; the
 *  final state goes to the last page. Pages that end at or before the prefix are never written. A prefix may end at
 *  any token. A sequence without new tokens reads and writes nothing; a padded sequence is one with a scratch page.
 *  Decode (cu_seqlens null): the token that opens a page (last_page_len 1) reads the page before and writes the new
 *  one; any other reads and writes the last page. A padded sequence has its own scratch page and last_page_len >= 2.
 *  slots->struct_size is set by the caller; the rest is written on success only. memory belongs to the caller, holds
 *  the
 *  arrays of slots and is also written after an error; its address is divisible by 8. Any thread.
 *  Errors: GDN_E_NULL; GDN_E_STRUCT_SIZE; GDN_E_SIZE (counts, page_size, memory_bytes); GDN_E_DTYPE; GDN_E_VALUE
 *  (memory not aligned); GDN_E_ALIAS (memory overlaps the table's arrays); GDN_E_LENGTHS
 *  (page_indptr, last_page_len, cu_seqlens, prefix_lens: too few or too many pages for prefix and new tokens, decode
 *  without a token before it); GDN_E_PAGE (an id out of range or twice in a sequence); GDN_E_ROW_CONFLICT (a page
 *  written by two sequences, or written by one and read by another). */
GDN_API gdn_status gdn_paged_slots(const gdn_page_table *table, void *memory, size_t memory_bytes, gdn_slots *slots);

/** Where a paged call's states are: a pool, and either the table or slots made from it. */
typedef struct gdn_paged_args {
  size_t struct_size;
  gdn_states pool;             /* rows null; n_rows at least n_pages of the table */
  const gdn_page_table *table; /* or null */
  const gdn_slots *slots;      /* or null; exactly one of both. Slots are not compared with any table. */
} gdn_paged_args;

/** gdn_prefill on a paged pool: args without initial_state, final_state, prefix_lens and checkpoints, which come from
 *  paged. With a table the rows are made anew in this call; with slots nothing is. Slots are checked like any rows:
 *  each is -1 or inside the pool, none is written twice or read by one sequence and written by another.
 *  Resuming from the page boundary gives the bits of the run that was not interrupted, as does a split at any multiple
 *  of 64 (see gdn_prefill). Pages outside the rows of the batch keep their bits.
 *  Errors: those of gdn_prefill and gdn_paged_slots; GDN_E_OPTION if args or paged hold what they must not. */
GDN_API gdn_status gdn_prefill_paged(gdn_ctx *ctx, const gdn_prefill_args *args, const gdn_paged_args *paged);

/** gdn_decode on a paged pool, likewise, of one token per sequence: without n_tokens above 1, token_counts and
 *  token_states. For several tokens take the rows of ready slots to gdn_decode. */
GDN_API gdn_status gdn_decode_paged(gdn_ctx *ctx, const gdn_decode_args *args, const gdn_paged_args *paged);

/* ---- for hosts that load the library at run time ---- */

/** The interface that this header describes. It grows when a function changes its meaning or goes away; functions that
 *  are only added do not change it. */
#define GDN_INTERFACE_VERSION 1

/** Every function above, so that a host needs dlsym for one name only. A later library of the same interface may have
 *  more functions at the end: struct_size is that of the library, and a host that was compiled against a newer header
 *  compares it with the offset of what it wants to call. */
typedef struct gdn_interface {
  size_t struct_size;
  uint32_t interface_version;
  uint32_t library_version; /* as gdn_version() */
  uint32_t (*version)(void);
  const char *(*version_string)(void);
  const char *(*status_name)(gdn_status status);
  const char *(*last_error)(void);
  gdn_status (*ctx_create)(const gdn_ctx_args *args, gdn_ctx **ctx);
  void (*ctx_destroy)(gdn_ctx *ctx);
  gdn_status (*ctx_info)(gdn_ctx *ctx, gdn_info *info);
  gdn_status (*ctx_run)(gdn_ctx *ctx, void (*fn)(void *arg, int32_t worker, int32_t n_workers), void *arg);
  gdn_status (*prefill)(gdn_ctx *ctx, const gdn_prefill_args *args);
  gdn_status (*prefill_form)(gdn_ctx *ctx, const gdn_prefill_args *args, int32_t *form);
  gdn_status (*decode)(gdn_ctx *ctx, const gdn_decode_args *args);
  gdn_status (*paged_slots_bytes)(const gdn_page_table *table, size_t *bytes);
  gdn_status (*paged_slots)(const gdn_page_table *table, void *memory, size_t memory_bytes, gdn_slots *slots);
  gdn_status (*prefill_paged)(gdn_ctx *ctx, const gdn_prefill_args *args, const gdn_paged_args *paged);
  gdn_status (*decode_paged)(gdn_ctx *ctx, const gdn_decode_args *args, const gdn_paged_args *paged);
  gdn_status (*gating)(gdn_ctx *ctx, const gdn_gating_args *args);
} gdn_interface;

/** The table for an interface version, GDN_INTERFACE_VERSION of the header that the host was compiled with; static
 *  storage, valid until the library is unloaded. Null for a version that this library does not have; gdn_last_error()
 *  then says which it has. The functions are those of this very library, also where several copies are loaded. */
GDN_API const gdn_interface *gdn_get_interface(uint32_t interface_version);

#ifdef __cplusplus
}
#endif

#endif /* GDN_H */
