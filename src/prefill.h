/* SPDX-License-Identifier: Apache-2.0
 * What prefill.c, recur.c and chunk.c share: one call's job, its tasks' columns, scratch carving. */
#ifndef GDN_PREFILL_H
#define GDN_PREFILL_H

#include "engine.h"

struct gdn_windows; /* below */

struct gdn_prefill_job {
  struct gdn_ctx *ctx;
  const struct gdn_batch *batch;
  const struct gdn_gemms *gemms; /* chunk form only */
  int form;
  int stream_states;           /* 1: stored states go past the caches */
  struct gdn_windows *windows; /* null = no sequence runs in windows */
  atomic_llong next;           /* task of the plan */
};

/* ---- scratch: blocks one after the other, each aligned ---- */

struct gdn_carver {
  char *base; /* null while only the size is wanted */
  size_t bytes;
};

static inline void *gdn_carve(struct gdn_carver *c, size_t bytes) {
  void *block = c->base ? c->base + c->bytes : NULL;
  c->bytes += (bytes + GDN_ALIGN_BYTES - 1) / GDN_ALIGN_BYTES * GDN_ALIGN_BYTES;
  return block;
}

static inline float *gdn_carve_floats(struct gdn_carver *c, int64_t n) {
  return gdn_carve(c, (size_t)n * sizeof(float));
}

/* ---- a task's units as columns of value heads ---- */

struct gdn_columns {
  int head, col, n_cols;
  int slot; /* units before it in the task */
};

/* Those from unit on that lie in one value head, at most most wide. */
struct gdn_columns gdn_columns_at(const struct gdn_batch *b, const struct gdn_task *t, int unit, int most);

/* For every run of units of task t in one value head, at most most columns wide: c is the run, u its first unit. */
#define GDN_EACH_COLUMNS(b, t, most, u, c)                                                                             \
  for (int u = (t)->unit; u < (t)->unit + (t)->n_units && ((c) = gdn_columns_at(b, t, u, most), 1);                    \
       u += (c).n_cols / GDN_PANEL)

/* The same rows from column col on. */
struct gdn_rows gdn_rows_from(struct gdn_rows r, int col);
struct gdn_rows_out gdn_rows_out_from(struct gdn_rows_out r, int col);

/* Working states of a task, [n_units][dim_k][32], from and to state rows; absent rows load zeros, store nothing. */
void gdn_states_load(const struct gdn_prefill_job *job, const struct gdn_task *t, float *state);
void gdn_states_store(const struct gdn_prefill_job *job, const struct gdn_task *t, const struct gdn_pool *pool,
                      int64_t row, const float *state);

/* ---- recur.c ---- */

struct gdn_recur_scratch {
  float *q, *k;             /* [block][dim_k] */
  float *kq, *decay, *beta; /* [block] */
  float *v;                 /* [block][recur_cols] */
};

/* Carves a worker's scratch for the recurrent form, without states. */
void gdn_recur_carve(struct gdn_carver *c, const struct gdn_prefill_job *job, struct gdn_recur_scratch *s);
/* Runs tokens [token, end) of the task's units on working states. */
void gdn_recur_tokens(const struct gdn_prefill_job *job, const struct gdn_task *t, const struct gdn_recur_scratch *s,
                      float *state, int64_t token, int64_t end);
/* A whole task of the plan. */
void gdn_recur_task(const struct gdn_prefill_job *job, const struct gdn_task *t, char *scratch);
size_t gdn_recur_scratch_bytes(const struct gdn_prefill_job *job);

/* ---- chunk.c ---- */

/* A whole task of the plan. */
void gdn_chunk_task(const struct gdn_prefill_job *job, const struct gdn_task *t, char *scratch);
size_t gdn_chunk_scratch_bytes(const struct gdn_prefill_job *job);

/* One lane's part in windows: states for the whole call, and two windows of what needs no state. */
struct gdn_window_lane {
  int64_t seq;
  int head; /* q/k head */
  float *state, *state_op;
  char *slots; /* [2][window] of slot_bytes */
};

/* The sequences that the plan leaves to windows; lanes is null before gdn_windows_begin. */
struct gdn_windows {
  int n_lanes, parts; /* tasks of stage 2 per lane */
  int window;         /* chunks */
  int64_t n_windows;
  size_t slot_bytes;
  struct gdn_window_lane *lanes;
  /* Counters of an even and an odd phase: while one is in use, the other is made ready. */
  struct gdn_share *shares[2]; /* [n_workers] tasks of stage 2, own ones first */
  struct gdn_share *local[2];  /* [n_workers] chunks of stage 1, those of own lanes first */
};

/* Sizes w; the bytes that all workers share. */
size_t gdn_windows_bytes(const struct gdn_prefill_job *job, struct gdn_windows *w);
void gdn_windows_begin(struct gdn_prefill_job *job, struct gdn_windows *w, char *memory);
/* Every worker calls it; returns when nothing is left to take. */
void gdn_windows_run(const struct gdn_prefill_job *job, int worker, int n_workers, char *scratch);

#endif
