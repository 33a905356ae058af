/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench run: cases in the golden format through prefill, then token by token through decode. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "npy.h"

/* ---- a case on disk ---- */

/* Names of sizes; DIM_OFFSETS is one more than DIM_SEQS. */
enum dim { DIM_TOKENS, DIM_HEADS, DIM_V_HEADS, DIM_K, DIM_V, DIM_SEQS, DIM_OFFSETS, DIM_ONE, DIM_POINTS, N_DIMS };

static const char *const dim_names[N_DIMS] = {"tokens",    "heads",         "value heads", "K",          "V",
                                              "sequences", "sequences + 1", "page_size",   "checkpoints"};

/* From FILE_INITIAL on optional; the last four come together. */
enum {
  FILE_Q,
  FILE_K,
  FILE_V,
  FILE_G,
  FILE_BETA,
  FILE_CU_SEQLENS,
  FILE_OUT,
  FILE_FINAL,
  FILE_INITIAL,
  FILE_PAGE_SIZE,
  FILE_PREFIX_LENS,
  FILE_POINT_STARTS,
  FILE_POINTS,
  N_FILES
};

struct file_spec {
  const char *name;
  enum npy_type type;
  int n_dims;
  enum dim dims[4];
};

static const struct file_spec specs[N_FILES] = {
    [FILE_Q] = {"q", NPY_U16, 3, {DIM_TOKENS, DIM_HEADS, DIM_K}},
    [FILE_K] = {"k", NPY_U16, 3, {DIM_TOKENS, DIM_HEADS, DIM_K}},
    [FILE_V] = {"v", NPY_U16, 3, {DIM_TOKENS, DIM_V_HEADS, DIM_V}},
    [FILE_G] = {"g", NPY_F32, 2, {DIM_TOKENS, DIM_V_HEADS}},
    [FILE_BETA] = {"beta", NPY_U16, 2, {DIM_TOKENS, DIM_V_HEADS}},
    [FILE_CU_SEQLENS] = {"cu_seqlens", NPY_I32, 1, {DIM_OFFSETS}},
    [FILE_OUT] = {"out", NPY_F32, 3, {DIM_TOKENS, DIM_V_HEADS, DIM_V}},
    [FILE_FINAL] = {"final_state", NPY_F32, 4, {DIM_SEQS, DIM_V_HEADS, DIM_V, DIM_K}},
    [FILE_INITIAL] = {"initial_state", NPY_F32, 4, {DIM_SEQS, DIM_V_HEADS, DIM_V, DIM_K}},
    [FILE_PAGE_SIZE] = {"page_size", NPY_I32, 1, {DIM_ONE}},
    [FILE_PREFIX_LENS] = {"prefix_lens", NPY_I32, 1, {DIM_SEQS}},
    [FILE_POINT_STARTS] = {"checkpoint_cu_starts", NPY_I32, 1, {DIM_OFFSETS}},
    [FILE_POINTS] = {"checkpoints", NPY_F32, 4, {DIM_POINTS, DIM_V_HEADS, DIM_V, DIM_K}},
};

struct golden {
  const char *dir;
  struct npy files[N_FILES];
  int64_t dims[N_DIMS]; /* -1 until a file tells it */
};

static char *join_path(const char *dir, const char *name) {
  size_t bytes = strlen(dir) + strlen(name) + 6;
  char *path = malloc(bytes);
  if (path) {
    snprintf(path, bytes, "%s/%s.npy", dir, name);
  }
  return path;
}

/* The first file that has a size sets it, the later ones must agree. */
static int check_shape(struct golden *c, int file, const char *path) {
  const struct file_spec *spec = &specs[file];
  const struct npy *a = &c->files[file];
  if (a->type != spec->type) {
    return bench_error("%s: elements are %s, expected %s", path, npy_type_name(a->type), npy_type_name(spec->type));
  }
  if (a->n_dims != spec->n_dims) {
    return bench_error("%s: array has %d dimensions, expected %d", path, a->n_dims, spec->n_dims);
  }
  for (int i = 0; i < spec->n_dims; i++) {
    enum dim d = spec->dims[i];
    if (a->shape[i] > INT32_MAX || (d == DIM_OFFSETS && a->shape[i] < 1)) {
      return bench_error("%s: %s is %lld, out of range", path, dim_names[d], (long long)a->shape[i]);
    }
    if (c->dims[d] < 0) {
      c->dims[d] = a->shape[i];
    }
    if (c->dims[d] != a->shape[i]) {
      return bench_error("%s: %s is %lld, but %lld in the case's other files", path, dim_names[d],
                         (long long)a->shape[i], (long long)c->dims[d]);
    }
    if (d == DIM_OFFSETS) {
      c->dims[DIM_SEQS] = a->shape[i] - 1;
    }
  }
  return BENCH_OK;
}

static bool file_exists(const char *path) {
  FILE *f = fopen(path, "rb");
  if (f) {
    fclose(f);
  }
  return f != NULL;
}

static bool is_paged(const struct golden *c) {
  return c->files[FILE_PAGE_SIZE].data != NULL;
}

static bool is_optional(const struct golden *c, int file) {
  return file == FILE_INITIAL || file == FILE_PAGE_SIZE || (file > FILE_PAGE_SIZE && !is_paged(c));
}

static int load_file(struct golden *c, int file) {
  char *path = join_path(c->dir, specs[file].name);
  if (!path) {
    return bench_error("out of memory for a path");
  }
  int status = BENCH_OK;
  if (!is_optional(c, file) || file_exists(path)) {
    char error[160];
    status = npy_load(path, &c->files[file], error, sizeof error) == 0 ? check_shape(c, file, path)
                                                                       : bench_error("%s: %s", path, error);
  }
  free(path);
  return status;
}

static int check_offsets(const struct golden *c) {
  const int32_t *cu = c->files[FILE_CU_SEQLENS].data;
  int64_t n_seqs = c->dims[DIM_SEQS];
  bool valid = cu[0] == 0 && cu[n_seqs] == c->dims[DIM_TOKENS];
  for (int64_t i = 0; i < n_seqs; i++) {
    valid = valid && cu[i + 1] >= cu[i];
  }
  return valid ? BENCH_OK
               : bench_error("%s/cu_seqlens.npy: does not rise from 0 to %lld, the tokens of q.npy", c->dir,
                             (long long)c->dims[DIM_TOKENS]);
}

/* Offsets and lengths of a paged case must leave each sequence as many checkpoints as it has. */
static int check_pages(const struct golden *c) {
  const int32_t *cu = c->files[FILE_CU_SEQLENS].data, *prefix = c->files[FILE_PREFIX_LENS].data;
  const int32_t *starts = c->files[FILE_POINT_STARTS].data;
  const int64_t page_size = *(const int32_t *)c->files[FILE_PAGE_SIZE].data;
  if (page_size < 1) {
    return bench_error("%s/page_size.npy: %lld is not positive", c->dir, (long long)page_size);
  }
  bool valid = starts[0] == 0 && starts[c->dims[DIM_SEQS]] == c->dims[DIM_POINTS];
  for (int64_t i = 0; i < c->dims[DIM_SEQS]; i++) {
    int64_t len = prefix[i] + (int64_t)cu[i + 1] - cu[i];
    if (prefix[i] < 0) {
      return bench_error("%s/prefix_lens.npy: %d is negative", c->dir, prefix[i]);
    }
    valid = valid && starts[i + 1] - (int64_t)starts[i] == len / page_size - prefix[i] / page_size;
  }
  return valid
             ? BENCH_OK
             : bench_error("%s/checkpoint_cu_starts.npy: does not agree with lengths, prefixes and page_size", c->dir);
}

static int load_case(struct golden *c, const char *dir) {
  memset(c, 0, sizeof *c);
  c->dir = dir;
  for (int i = 0; i < N_DIMS; i++) {
    c->dims[i] = -1;
  }
  c->dims[DIM_ONE] = 1;
  int status = BENCH_OK;
  for (int i = 0; i < N_FILES && status == BENCH_OK; i++) {
    status = load_file(c, i);
  }
  if (status == BENCH_OK) {
    status = check_offsets(c);
  }
  return status == BENCH_OK && is_paged(c) ? check_pages(c) : status;
}

static void free_case(struct golden *c) {
  for (int i = 0; i < N_FILES; i++) {
    npy_free(&c->files[i]);
  }
}

/* ---- its results ---- */

struct result {
  char name[TABLE_CELL_BYTES];
  double out_rel_l2, state_rel_l2, decode_out_rel_l2, decode_state_rel_l2;
  double checkpoint_rel_l2; /* NaN without checkpoints */
  bool pass;
};

struct bounds {
  double out, state;
};

/* f32 tiers: the rounding of out to bf16, and f32 sums. bf16 tiers: the level of GPU kernels. */
static const struct bounds f32_bounds = {1.8e-3, 1e-5};
static const struct bounds bf16_bounds = {3.5e-3, 3e-3};

/* What one case is computed in; everything starts as null. */
struct buffers {
  uint16_t *out;                  /* [tokens][value heads][V] */
  float *states;                  /* like final_state */
  uint16_t *q, *k, *v, *step_out; /* one token of every sequence */
  float *g;
  uint16_t *beta;
  int32_t *rows; /* sequence of each token of a step */
  float *points; /* like checkpoints; null in a case without pages */
};

static void *alloc_dims(const struct golden *c, int64_t elem_bytes, int n_dims, const enum dim *dims) {
  int64_t n = 1;
  for (int i = 0; i < n_dims; i++) {
    int64_t size = c->dims[dims[i]];
    if (size > 0 && n > INT64_MAX / 16 / size) {
      return NULL;
    }
    n *= size;
  }
  return bench_alloc(n, elem_bytes);
}

static int alloc_buffers(struct buffers *b, const struct golden *c) {
  const enum dim qk[] = {DIM_SEQS, DIM_HEADS, DIM_K};
  const enum dim v[] = {DIM_SEQS, DIM_V_HEADS, DIM_V};
  b->out = alloc_dims(c, 2, 3, specs[FILE_OUT].dims);
  b->states = alloc_dims(c, 4, 4, specs[FILE_FINAL].dims);
  b->q = alloc_dims(c, 2, 3, qk);
  b->k = alloc_dims(c, 2, 3, qk);
  b->v = alloc_dims(c, 2, 3, v);
  b->step_out = alloc_dims(c, 2, 3, v);
  b->g = alloc_dims(c, 4, 2, v);
  b->beta = alloc_dims(c, 2, 2, v);
  b->rows = alloc_dims(c, 4, 1, v);
  b->points = is_paged(c) ? alloc_dims(c, 4, 4, specs[FILE_POINTS].dims) : NULL;
  bool complete = (b->points || !is_paged(c)) && b->out && b->states && b->q && b->k && b->v && b->step_out && b->g &&
                  b->beta && b->rows;
  return complete ? BENCH_OK : bench_error("%s: out of memory", c->dir);
}

static void free_buffers(struct buffers *b) {
  free(b->out);
  free(b->states);
  free(b->q);
  free(b->k);
  free(b->v);
  free(b->step_out);
  free(b->g);
  free(b->beta);
  free(b->rows);
  free(b->points);
}

/* Sequences without tokens write no state, so states start as the initial ones; out starts as NaN. */
static void reset_outputs(struct buffers *b, const struct golden *c) {
  size_t state_bytes = (size_t)c->files[FILE_FINAL].n_elems * sizeof(float);
  if (c->files[FILE_INITIAL].data) {
    memcpy(b->states, c->files[FILE_INITIAL].data, state_bytes);
  } else {
    memset(b->states, 0, state_bytes);
  }
  memset(b->out, 0xFF, (size_t)c->files[FILE_OUT].n_elems * sizeof *b->out);
}

static double rel_l2(double difference, double norm) {
  return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static double out_error(const struct buffers *b, const struct golden *c) {
  const float *expected = c->files[FILE_OUT].data;
  double difference = 0;
  double norm = 0;
  for (int64_t i = 0; i < c->files[FILE_OUT].n_elems; i++) {
    double d = (double)bench_bf16_to_f32(b->out[i]) - expected[i];
    difference += d * d;
    norm += (double)expected[i] * expected[i];
  }
  return rel_l2(difference, norm);
}

/* file: FILE_FINAL or FILE_POINTS. */
static double state_error(const float *states, const struct golden *c, int file) {
  const float *expected = c->files[file].data;
  double difference = 0;
  double norm = 0;
  for (int64_t i = 0; i < c->files[file].n_elems; i++) {
    double d = (double)states[i] - expected[i];
    difference += d * d;
    norm += (double)expected[i] * expected[i];
  }
  return rel_l2(difference, norm);
}

/* ---- prefill ---- */

/* The call without states. */
static gdn_prefill_args prefill_args(const struct golden *c, const struct buffers *b, int32_t form) {
  const struct npy *f = c->files;
  return (gdn_prefill_args){
      .struct_size = sizeof(gdn_prefill_args),
      .flags = GDN_L2NORM_QK,
      .form = form,
      .n_seqs = c->dims[DIM_SEQS],
      .n_tokens = c->dims[DIM_TOKENS],
      .n_heads_k = (int32_t)c->dims[DIM_HEADS],
      .n_heads_v = (int32_t)c->dims[DIM_V_HEADS],
      .dim_k = (int32_t)c->dims[DIM_K],
      .dim_v = (int32_t)c->dims[DIM_V],
      .cu_seqlens = f[FILE_CU_SEQLENS].data,
      .cu_seqlens_dtype = GDN_I32,
      .q = {.data = f[FILE_Q].data, .dtype = GDN_BF16},
      .k = {.data = f[FILE_K].data, .dtype = GDN_BF16},
      .v = {.data = f[FILE_V].data, .dtype = GDN_BF16},
      .g = {.data = f[FILE_G].data, .dtype = GDN_F32},
      .beta = {.data = f[FILE_BETA].data, .dtype = GDN_BF16},
      .out = {.data = b->out, .dtype = GDN_BF16},
  };
}

static int run_prefill(const struct bench_session *s, const struct golden *c, struct buffers *b, int32_t form) {
  gdn_prefill_args args = prefill_args(c, b, form);
  args.initial_state = (gdn_states){.data = c->files[FILE_INITIAL].data, .n_rows = args.n_seqs, .dtype = GDN_F32};
  args.final_state = (gdn_states){.data = b->states, .n_rows = args.n_seqs, .dtype = GDN_F32};
  reset_outputs(b, c);
  gdn_status status = gdn_prefill(s->ctx, &args);
  return status == GDN_OK ? BENCH_OK
                          : bench_error("%s: gdn_prefill: %s: %s", c->dir, gdn_status_name(status), gdn_last_error());
}

/* ---- prefill on pages ---- */

/* Page j of sequence i is row indptr[i] + j of the pool. */
struct pages {
  int64_t *indices, *indptr, *last, *prefix;
  float *pool;
  int64_t size, n, row; /* tokens of a page; pages; floats of one */
};

static int64_t seq_len(const struct golden *c, int64_t seq) {
  const int32_t *cu = c->files[FILE_CU_SEQLENS].data, *prefix = c->files[FILE_PREFIX_LENS].data;
  return prefix[seq] + (int64_t)cu[seq + 1] - cu[seq];
}

static void free_pages(struct pages *p) {
  free(p->indices);
  free(p->indptr);
  free(p->last);
  free(p->prefix);
  free(p->pool);
}

/* A sequence without any token is padded: a scratch page of one token. */
static int make_pages(const struct golden *c, struct pages *p) {
  const int64_t n_seqs = c->dims[DIM_SEQS];
  const int32_t *prefix = c->files[FILE_PREFIX_LENS].data;
  p->size = *(const int32_t *)c->files[FILE_PAGE_SIZE].data;
  p->row = c->dims[DIM_V_HEADS] * c->dims[DIM_V] * c->dims[DIM_K];
  p->indptr = bench_alloc(n_seqs + 1, sizeof *p->indptr);
  p->last = bench_alloc(n_seqs, sizeof *p->last);
  p->prefix = bench_alloc(n_seqs, sizeof *p->prefix);
  if (!p->indptr || !p->last || !p->prefix) {
    return bench_error("%s: out of memory", c->dir);
  }
  p->indptr[0] = 0;
  for (int64_t i = 0; i < n_seqs; i++) {
    int64_t len = seq_len(c, i) > 0 ? seq_len(c, i) : 1;
    int64_t n = (len + p->size - 1) / p->size;
    p->indptr[i + 1] = p->indptr[i] + n;
    p->last[i] = len - (n - 1) * p->size;
    p->prefix[i] = seq_len(c, i) > 0 ? prefix[i] : 1;
  }
  p->n = p->indptr[n_seqs];
  p->indices = bench_alloc(p->n, sizeof *p->indices);
  p->pool = bench_alloc(p->n * p->row, sizeof *p->pool);
  if (!p->indices || !p->pool) {
    return bench_error("%s: out of memory for %lld pages", c->dir, (long long)p->n);
  }
  for (int64_t i = 0; i < p->n; i++) {
    p->indices[i] = i;
  }
  return BENCH_OK;
}

/* Initial states go to the page of the last prefix token, where the call looks for them. */
static void fill_pages(const struct golden *c, const struct pages *p) {
  const int32_t *prefix = c->files[FILE_PREFIX_LENS].data;
  const float *initial = c->files[FILE_INITIAL].data;
  memset(p->pool, 0xFF, (size_t)(p->n * p->row) * sizeof *p->pool);
  for (int64_t i = 0; i < c->dims[DIM_SEQS]; i++) {
    float *page = p->pool + (p->indptr[i] + (prefix[i] - 1) / p->size) * p->row;
    if (prefix[i] > 0 && initial) {
      memcpy(page, initial + i * p->row, (size_t)p->row * sizeof *page);
    } else if (prefix[i] > 0) {
      memset(page, 0, (size_t)p->row * sizeof *page);
    }
  }
}

/* Final states and checkpoints as the case's files have them. */
static void take_pages(const struct golden *c, const struct pages *p, struct buffers *b) {
  const int32_t *prefix = c->files[FILE_PREFIX_LENS].data, *starts = c->files[FILE_POINT_STARTS].data;
  const int32_t *cu = c->files[FILE_CU_SEQLENS].data;
  const size_t bytes = (size_t)p->row * sizeof(float);
  for (int64_t i = 0; i < c->dims[DIM_SEQS]; i++) {
    const float *first = p->pool + (p->indptr[i] + prefix[i] / p->size) * p->row;
    if (cu[i + 1] > cu[i]) {
      memcpy(b->states + i * p->row, p->pool + (p->indptr[i + 1] - 1) * p->row, bytes);
    }
    if (starts[i + 1] > starts[i]) {
      memcpy(b->points + starts[i] * p->row, first, (size_t)(starts[i + 1] - starts[i]) * bytes);
    }
  }
}

static int call_paged(const struct bench_session *s, const struct golden *c, const struct pages *p,
                      const struct buffers *b, int32_t form) {
  const int64_t n_seqs = c->dims[DIM_SEQS];
  const gdn_page_table table = {.struct_size = sizeof table,
                                .n_seqs = n_seqs,
                                .n_pages = p->n,
                                .page_size = p->size,
                                .n_page_indices = p->n,
                                .page_indices = p->indices,
                                .page_indptr = p->indptr,
                                .last_page_len = p->last,
                                .prefix_lens = p->prefix,
                                .index_dtype = GDN_I64};
  const gdn_paged_args paged = {
      .struct_size = sizeof paged, .pool = {.data = p->pool, .n_rows = p->n, .dtype = GDN_F32}, .table = &table};
  const gdn_prefill_args args = prefill_args(c, b, form);
  gdn_status status = gdn_prefill_paged(s->ctx, &args, &paged);
  return status == GDN_OK
             ? BENCH_OK
             : bench_error("%s: gdn_prefill_paged: %s: %s", c->dir, gdn_status_name(status), gdn_last_error());
}

static int run_paged(const struct bench_session *s, const struct golden *c, struct buffers *b, int32_t form) {
  struct pages p = {NULL};
  int status = make_pages(c, &p);
  reset_outputs(b, c);
  if (status == BENCH_OK) {
    fill_pages(c, &p);
    status = call_paged(s, c, &p, b, form);
  }
  if (status == BENCH_OK) {
    take_pages(c, &p, b);
  }
  free_pages(&p);
  return status;
}

/* ---- decode ---- */

/* Elements that one token holds in a file [tokens][..]. */
static int64_t token_elems(const struct golden *c, int file) {
  const struct npy *a = &c->files[file];
  int64_t n = 1;
  for (int i = 1; i < a->n_dims; i++) {
    n *= a->shape[i];
  }
  return n;
}

static void gather_u16(const struct golden *c, int file, int64_t token, uint16_t *to, int64_t place) {
  int64_t n = token_elems(c, file);
  memcpy(to + place * n, (const uint16_t *)c->files[file].data + token * n, (size_t)n * sizeof *to);
}

/* Gathers the t-th token of every sequence that has one; returns how many. */
static int64_t gather_step(const struct golden *c, struct buffers *b, int64_t t) {
  const int32_t *cu = c->files[FILE_CU_SEQLENS].data;
  const int64_t n_gates = token_elems(c, FILE_G);
  int64_t n = 0;
  for (int64_t i = 0; i < c->dims[DIM_SEQS]; i++) {
    int64_t token = cu[i] + t;
    if (token >= cu[i + 1]) {
      continue;
    }
    gather_u16(c, FILE_Q, token, b->q, n);
    gather_u16(c, FILE_K, token, b->k, n);
    gather_u16(c, FILE_V, token, b->v, n);
    gather_u16(c, FILE_BETA, token, b->beta, n);
    memcpy(b->g + n * n_gates, (const float *)c->files[FILE_G].data + token * n_gates, (size_t)n_gates * sizeof *b->g);
    b->rows[n++] = (int32_t)i;
  }
  return n;
}

static void scatter_step(const struct golden *c, struct buffers *b, int64_t t, int64_t n_seqs) {
  const int32_t *cu = c->files[FILE_CU_SEQLENS].data;
  const int64_t n = token_elems(c, FILE_OUT);
  for (int64_t i = 0; i < n_seqs; i++) {
    memcpy(b->out + (cu[b->rows[i]] + t) * n, b->step_out + i * n, (size_t)n * sizeof *b->out);
  }
}

static int decode_step(const struct bench_session *s, const struct golden *c, struct buffers *b, int64_t n_seqs) {
  const gdn_states pool = {
      .data = b->states, .n_rows = c->dims[DIM_SEQS], .rows = b->rows, .rows_dtype = GDN_I32, .dtype = GDN_F32};
  const gdn_decode_args args = {
      .struct_size = sizeof args,
      .flags = GDN_L2NORM_QK,
      .n_seqs = n_seqs,
      .n_heads_k = (int32_t)c->dims[DIM_HEADS],
      .n_heads_v = (int32_t)c->dims[DIM_V_HEADS],
      .dim_k = (int32_t)c->dims[DIM_K],
      .dim_v = (int32_t)c->dims[DIM_V],
      .q = {.data = b->q, .dtype = GDN_BF16},
      .k = {.data = b->k, .dtype = GDN_BF16},
      .v = {.data = b->v, .dtype = GDN_BF16},
      .g = {.data = b->g, .dtype = GDN_F32},
      .beta = {.data = b->beta, .dtype = GDN_BF16},
      .out = {.data = b->step_out, .dtype = GDN_BF16},
      .initial_state = pool,
      .final_state = pool,
  };
  gdn_status status = gdn_decode(s->ctx, &args);
  return status == GDN_OK ? BENCH_OK
                          : bench_error("%s: gdn_decode: %s: %s", c->dir, gdn_status_name(status), gdn_last_error());
}

static int run_decode(const struct bench_session *s, const struct golden *c, struct buffers *b) {
  reset_outputs(b, c);
  for (int64_t t = 0, n; (n = gather_step(c, b, t)) > 0; t++) {
    if (t % 64 == 0) {
      measure_progress("run: %s, decode of token %lld", c->dir, (long long)t);
    }
    int status = decode_step(s, c, b, n);
    if (status != BENCH_OK) {
      return status;
    }
    scatter_step(c, b, t, n);
  }
  return BENCH_OK;
}

/* ---- all cases ---- */

/* The last part of the path, without slashes at its end. */
static void name_case(const char *dir, char *name, size_t name_bytes) {
  size_t end = strlen(dir);
  while (end > 1 && dir[end - 1] == '/') {
    end--;
  }
  size_t start = end;
  while (start > 0 && dir[start - 1] != '/') {
    start--;
  }
  snprintf(name, name_bytes, "%.*s", (int)(end - start), dir + start);
}

static bool within(double out, double state, struct bounds bounds) {
  return out <= bounds.out && state <= bounds.state; /* false for NaN */
}

/* Whether prefill computes in bf16: the chunk form of the tiers above avx512. */
static bool bf16_form(const struct bench_session *s, const struct golden *c, const struct buffers *b, int32_t form) {
  const gdn_prefill_args args = prefill_args(c, b, form);
  int32_t taken = GDN_FORM_RECURRENT;
  bool tier = strcmp(s->info.isa, "amx") == 0 || strcmp(s->info.isa, "avx512bf16") == 0;
  return tier && gdn_prefill_form(s->ctx, &args, &taken) == GDN_OK && taken == GDN_FORM_CHUNK;
}

static int check_case(const struct bench_session *s, const struct golden *c, int32_t form, struct result *r) {
  struct buffers b = {0};
  int status = alloc_buffers(&b, c);
  if (status == BENCH_OK) {
    status = is_paged(c) ? run_paged(s, c, &b, form) : run_prefill(s, c, &b, form);
  }
  if (status == BENCH_OK) {
    r->out_rel_l2 = out_error(&b, c);
    r->state_rel_l2 = state_error(b.states, c, FILE_FINAL);
    r->checkpoint_rel_l2 = is_paged(c) ? state_error(b.points, c, FILE_POINTS) : (double)NAN;
    status = run_decode(s, c, &b);
  }
  if (status == BENCH_OK) {
    r->decode_out_rel_l2 = out_error(&b, c);
    r->decode_state_rel_l2 = state_error(b.states, c, FILE_FINAL);
    struct bounds bounds = bf16_form(s, c, &b, form) ? bf16_bounds : f32_bounds;
    r->pass = within(r->out_rel_l2, r->state_rel_l2, bounds) &&
              (!is_paged(c) || r->checkpoint_rel_l2 <= bounds.state) &&
              within(r->decode_out_rel_l2, r->decode_state_rel_l2, f32_bounds);
  }
  free_buffers(&b);
  return status;
}

static int run_cases(const struct bench_options *o, const struct bench_session *s, struct result *results) {
  int status = BENCH_OK;
  for (int i = 0; i < o->n_dirs && status == BENCH_OK; i++) {
    struct golden c;
    measure_progress("run: %s", o->dirs[i]);
    name_case(o->dirs[i], results[i].name, sizeof results[i].name);
    status = load_case(&c, o->dirs[i]);
    if (status == BENCH_OK) {
      status = check_case(s, &c, o->form, &results[i]);
    }
    free_case(&c);
    measure_progress_clear();
  }
  return status;
}

static void print_json(const struct bench_options *o, const struct bench_session *s, const struct result *results,
                       bool pass) {
  struct json j = {.file = stdout};
  json_begin_object(&j, NULL);
  json_string(&j, "command", "run");
  json_begin_array(&j, "cases");
  for (int i = 0; i < o->n_dirs; i++) {
    const struct result *r = &results[i];
    json_begin_object(&j, NULL);
    json_string(&j, "case", r->name);
    json_string(&j, "isa", s->info.isa);
    json_int(&j, "threads", s->info.n_threads);
    json_number(&j, "out_rel_l2", r->out_rel_l2);
    json_number(&j, "state_rel_l2", r->state_rel_l2);
    json_number(&j, "checkpoint_rel_l2", r->checkpoint_rel_l2);
    json_number(&j, "decode_out_rel_l2", r->decode_out_rel_l2);
    json_number(&j, "decode_state_rel_l2", r->decode_state_rel_l2);
    json_bool(&j, "pass", r->pass);
    json_end_object(&j);
  }
  json_end_array(&j);
  json_bool(&j, "pass", pass);
  bench_conditions_json(&j, s);
  json_end_object(&j);
}

static bool print_text(const struct bench_options *o, const struct bench_session *s, const struct result *results) {
  static const char *const headers[] = {"case", "out", "state", "checkpoints", "decode out", "decode state", "result"};
  bench_conditions_print(s);
  printf("relative L2 error against float64\n\n");
  struct table t;
  table_begin(&t, 7, headers);
  for (int i = 0; i < o->n_dirs; i++) {
    const struct result *r = &results[i];
    table_cell(&t, "%s", r->name);
    table_cell(&t, "%.2e", r->out_rel_l2);
    table_cell(&t, "%.2e", r->state_rel_l2);
    if (isnan(r->checkpoint_rel_l2)) {
      table_cell(&t, "-");
    } else {
      table_cell(&t, "%.2e", r->checkpoint_rel_l2);
    }
    table_cell(&t, "%.2e", r->decode_out_rel_l2);
    table_cell(&t, "%.2e", r->decode_state_rel_l2);
    table_cell(&t, "%s", r->pass ? "pass" : "FAIL");
  }
  return table_end(&t, stdout);
}

int bench_run(const struct bench_options *o) {
  struct bench_session s;
  struct result *results = calloc((size_t)o->n_dirs, sizeof *results);
  if (!results) {
    return bench_error("out of memory for %d cases", o->n_dirs);
  }
  int status = bench_open(o, &s);
  if (status != BENCH_OK) {
    free(results);
    return status;
  }
  status = run_cases(o, &s, results);
  bool pass = true;
  for (int i = 0; i < o->n_dirs; i++) {
    pass = pass && results[i].pass;
  }
  if (status == BENCH_OK && o->json) {
    print_json(o, &s, results, pass);
  } else if (status == BENCH_OK && !print_text(o, &s, results)) {
    status = bench_error("out of memory for the table");
  }
  free(results);
  bench_close(&s);
  return status != BENCH_OK ? status : pass ? BENCH_OK : BENCH_FAILED;
}
