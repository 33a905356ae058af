/* SPDX-License-Identifier: Apache-2.0
 * The chunk form over the table of primitives, in two schedules that give the same bits.
 * Lanes: a task runs its lane from first to last chunk, everything between stays in its core's caches.
 * Windows: lanes too few for the threads go through in windows of chunks. While one window's states are carried through
 * slices of V (stage 2), the next one's work that needs no state is done chunk by chunk (stage 1). */
#include "prefill.h"

#include <string.h>

/* ---- what is made per chunk and what is made per worker ---- */

/* Per chunk and q/k head; kept for stage 2. */
static void carve_qk(struct gdn_carver *c, const struct gdn_batch *b, struct gdn_chunk *k) {
  k->q = gdn_carve_floats(c, GDN_CHUNK * b->dim_k);
  k->k = gdn_carve_floats(c, GDN_CHUNK * b->dim_k);
  k->kt = gdn_carve_floats(c, GDN_CHUNK * b->dim_k);
  k->q_mult = gdn_carve_floats(c, GDN_CHUNK);
  k->k_mult = gdn_carve_floats(c, GDN_CHUNK);
  k->qk_op = gdn_carve(c, GDN_CHUNK * GDN_CHUNK * 2);
}

/* Per chunk and value head; kept for stage 2. */
static void carve_head(struct gdn_carver *c, struct gdn_chunk *k) {
  k->gate_hi = gdn_carve_floats(c, GDN_CHUNK);
  k->gate_lo = gdn_carve_floats(c, GDN_CHUNK);
  k->decay = gdn_carve_floats(c, GDN_CHUNK);
  k->decay_in = gdn_carve_floats(c, GDN_CHUNK);
  k->decay_out = gdn_carve_floats(c, GDN_CHUNK);
  k->decay_all = gdn_carve_floats(c, 1);
  k->steep = gdn_carve(c, sizeof *k->steep);
  k->beta = gdn_carve_floats(c, GDN_CHUNK);
  k->a = gdn_carve_floats(c, GDN_CHUNK * GDN_CHUNK);
  k->t = gdn_carve_floats(c, GDN_CHUNK * GDN_CHUNK);
}

struct worker_scratch {
  struct gdn_chunk chunk; /* its passing buffers, and the call's constants */
  float *panels;          /* [dim_v / 32][dim_k][32] for a checkpoint inside a chunk */
  struct gdn_recur_scratch recur;
};

static void carve_worker(struct gdn_carver *c, const struct gdn_prefill_job *job, struct worker_scratch *w) {
  const struct gdn_batch *b = job->batch;
  const int64_t vv = GDN_CHUNK * b->dim_v;
  struct gdn_chunk *k = &w->chunk;
  *k = (struct gdn_chunk){
      .dim_k = b->dim_k, .dim_v = b->dim_v, .l2norm = b->l2norm, .scale = b->scale, .eps = b->eps, .gemms = job->gemms};
  k->hot = gdn_carve(c, GDN_HOT_BYTES);
  k->kk = gdn_carve_floats(c, GDN_CHUNK * GDN_CHUNK);
  k->qk = gdn_carve_floats(c, GDN_CHUNK * GDN_CHUNK);
  k->l = gdn_carve_floats(c, GDN_CHUNK * GDN_CHUNK);
  k->resid = gdn_carve_floats(c, vv);
  k->inter = gdn_carve_floats(c, vv);
  k->delta = gdn_carve_floats(c, vv);
  k->delta_f32 = k->delta;
  k->delta_out = gdn_carve_floats(c, vv);
  w->panels = gdn_carve_floats(c, b->checkpoint_every ? (int64_t)b->dim_k * b->dim_v : 0);
  gdn_recur_carve(c, job, &w->recur);
}

/* ---- steps of one chunk ---- */

/* A range of a lane's units with its states: state[0] is the first panel of value head first_head of the group. */
struct lane {
  struct gdn_task task;
  int first_head;
  float *state, *state_op;
};

/* Units of the task's first head before the task's own. */
static int lead_units(const struct gdn_batch *b, const struct gdn_task *t) {
  return t->unit % (b->dim_v / GDN_PANEL);
}

/* Where the task's own states begin. */
static float *lane_states(const struct gdn_batch *b, const struct lane *l) {
  int64_t units = l->task.unit - (int64_t)l->first_head * (b->dim_v / GDN_PANEL);
  return l->state + units * b->dim_k * GDN_PANEL;
}

static int group_head(const struct gdn_batch *b, int head) {
  return head % (b->n_heads_v / b->n_heads_k);
}

static void point_to_state(const struct gdn_batch *b, const struct lane *l, int head, struct gdn_chunk *k) {
  int64_t at = (int64_t)(group_head(b, head) - l->first_head) * b->dim_v * b->dim_k;
  k->state = l->state + at;
  k->state_op = l->state_op + at;
}

static void make_qk(const struct gdn_prefill_job *job, struct gdn_chunk *k, int head, int64_t token, int64_t end) {
  const struct gdn_batch *b = job->batch;
  k->n = (int)(end - token);
  k->n16 = (k->n + GDN_BLOCK - 1) / GDN_BLOCK * GDN_BLOCK;
  k->q_rows = gdn_array_rows(&b->q, token, head);
  k->k_rows = gdn_array_rows(&b->k, token, head);
  job->ctx->kernels.chunk_qk(k);
}

static void make_head(const struct gdn_prefill_job *job, struct gdn_chunk *k, int head_v, int64_t token) {
  const struct gdn_kernels *kernels = &job->ctx->kernels;
  const struct gdn_batch *b = job->batch;
  _Alignas(GDN_ALIGN_BYTES) float g[GDN_CHUNK], beta[GDN_CHUNK];
  struct gdn_gates gates = gdn_batch_gates(b, token, head_v, k->n);
  k->g_rows = gates.g;
  k->beta_rows = gates.beta;
  /* chunk_gates knows log gates, and beta in the types that its callers had first. */
  if (b->g_mode != GDN_GATE_LOG || b->beta_sigmoid || b->beta.dtype == GDN_F16) {
    gates.as_log = 1;
    gates.g_out = g;
    gates.beta_out = beta;
    kernels->gates(&gates);
    k->g_rows = (struct gdn_rows){g, 1, GDN_ROWS_F32};
    k->beta_rows = (struct gdn_rows){beta, 1, GDN_ROWS_F32};
  }
  kernels->chunk_gates(k);
  kernels->chunk_mask(k);
  kernels->chunk_solve(k);
}

/* Checkpoints j * every with first <= j <= last lie in (token, end]; absolute positions. */
struct due {
  int64_t first, last, before, at; /* before: of the sequence ahead of its prefix; at: absolute position of token */
};

static struct due checkpoints_due(const struct gdn_batch *b, int64_t seq, int64_t token, int64_t end) {
  if (!b->checkpoint_every) return (struct due){1, 0, 0, 0};
  int64_t prefix = gdn_batch_prefix(b, seq), at = prefix + token - gdn_batch_start(b, seq);
  return (struct due){at / b->checkpoint_every + 1, (at + end - token) / b->checkpoint_every,
                      prefix / b->checkpoint_every, at};
}

static int64_t checkpoint_row(const struct gdn_batch *b, int64_t seq, const struct due *d, int64_t j) {
  return gdn_pool_row(&b->checkpoints, gdn_int(&b->checkpoint_cu_starts, seq) + j - d->before - 1);
}

/* Carries the state of columns c through the chunk, and stores the checkpoints that are due in it. */
static void carry_state(const struct gdn_prefill_job *job, const struct worker_scratch *w, const struct gdn_chunk *k,
                        int64_t seq, const struct gdn_columns *c, const struct due *d) {
  const struct gdn_batch *b = job->batch;
  const struct gdn_kernels *kernels = &job->ctx->kernels;
  const float *own = k->state + (int64_t)c->col * b->dim_k;
  int carried = 0;
  for (int64_t j = d->first; j <= d->last; j++) {
    int n_at = (int)(j * b->checkpoint_every - d->at);
    int64_t row = checkpoint_row(b, seq, d, j);
    if (row < 0) continue;
    if (n_at < k->n)
      kernels->chunk_state_at(k, n_at, c->col, c->n_cols, w->panels);
    else
      kernels->chunk_state(k, c->col, c->n_cols);
    carried = n_at == k->n;
    if (carried) kernels->chunk_end(k, c->col, c->n_cols);
    kernels->state_store(c->n_cols, b->dim_k, carried ? own : w->panels,
                         gdn_pool_state(&b->checkpoints, b, row, c->head, c->col));
  }
  if (!carried) kernels->chunk_state(k, c->col, c->n_cols);
}

/* Whether the chunk that begins at token starts from a zero state of which nothing is in memory. */
static int starts_from_nothing(const struct gdn_prefill_job *job, int64_t seq, int64_t token) {
  const struct gdn_batch *b = job->batch;
  return job->ctx->kernels.knows_zero && token == gdn_batch_start(b, seq) && gdn_pool_row(&b->initial, seq) < 0 &&
         gdn_chunk_end(b, seq, token) - token >= job->ctx->kernels.chunk_min;
}

/* V' to state of columns c, as many at a time as the tier's passing buffers stay in its cache for; k points to
 * what make_qk and make_head made, and to the state. */
static void scan_columns(const struct gdn_prefill_job *job, const struct worker_scratch *w, struct gdn_chunk *k,
                         int64_t seq, const struct gdn_columns *c, int64_t token) {
  const struct gdn_batch *b = job->batch;
  const struct gdn_kernels *kernels = &job->ctx->kernels;
  struct due d = checkpoints_due(b, seq, token, token + k->n);
  k->zero_state = starts_from_nothing(job, seq, token);
  k->v_rows = gdn_array_rows(&b->v, token, c->head);
  k->out_rows = gdn_array_rows_out(&b->out, token, c->head);
  const int stop = c->col + c->n_cols;
  for (struct gdn_columns part = *c; part.col < stop; part.col += part.n_cols) {
    part.n_cols = stop - part.col < kernels->scan_cols ? stop - part.col : kernels->scan_cols;
    kernels->chunk_delta(k, part.col, part.n_cols);
    kernels->chunk_out(k, part.col, part.n_cols);
    carry_state(job, w, k, seq, &part, &d);
  }
}

/* Between chunks the states of a lane are in state_op: chunk_begin brings them there from state, chunk_end back. */
static void move_states(const struct gdn_prefill_job *job, const struct lane *l, struct gdn_chunk *k,
                        gdn_chunk_begin_fn *move) {
  const struct gdn_batch *b = job->batch;
  struct gdn_columns c;
  GDN_EACH_COLUMNS(b, &l->task, b->dim_v, u, c) {
    point_to_state(b, l, c.head, k);
    move(k, c.col, c.n_cols);
  }
}

/* Stores the final states after the sequence's last chunk, which begins at token. */
static void store_states(const struct gdn_prefill_job *job, const struct lane *l, struct gdn_chunk *k, int64_t token) {
  const struct gdn_batch *b = job->batch;
  const int64_t seq = l->task.seq, row = gdn_pool_row(&b->final, seq);
  if (row < 0) return;
  if (gdn_chunk_end(b, seq, token) - token >= job->ctx->kernels.chunk_min)
    move_states(job, l, k, job->ctx->kernels.chunk_end);
  gdn_states_store(job, &l->task, &b->final, row, lane_states(b, l));
}

/* A chunk too short for matrix products: its tokens one by one on the same states. */
static void run_short_chunk(const struct gdn_prefill_job *job, struct worker_scratch *w, const struct lane *l,
                            int64_t token, int64_t end) {
  const struct gdn_batch *b = job->batch;
  const int64_t seq = l->task.seq;
  float *state = lane_states(b, l);
  struct due d = checkpoints_due(b, seq, token, end);
  if (token > gdn_batch_start(b, seq)) move_states(job, l, &w->chunk, job->ctx->kernels.chunk_end);
  for (int64_t j = d.first; j <= d.last; j++) {
    int64_t stop = token + j * b->checkpoint_every - d.at;
    d.at = j * b->checkpoint_every;
    gdn_recur_tokens(job, &l->task, &w->recur, state, token, stop);
    gdn_states_store(job, &l->task, &b->checkpoints, checkpoint_row(b, seq, &d, j), state);
    token = stop;
  }
  gdn_recur_tokens(job, &l->task, &w->recur, state, token, end);
  if (end < gdn_batch_start(b, seq) + gdn_batch_len(b, seq))
    move_states(job, l, &w->chunk, job->ctx->kernels.chunk_begin);
}

/* ---- lanes ---- */

/* States of whole heads, also where a task lacks panels at its start. */
static void carve_lane(struct gdn_carver *c, const struct gdn_prefill_job *job, struct worker_scratch *w,
                       struct lane *l) {
  const struct gdn_batch *b = job->batch;
  int64_t slots = job->ctx->plan.n_slots + 2 * (b->dim_v / GDN_PANEL);
  carve_worker(c, job, w);
  carve_qk(c, b, &w->chunk);
  carve_head(c, &w->chunk);
  l->state = gdn_carve_floats(c, slots * b->dim_k * GDN_PANEL);
  l->state_op = gdn_carve_floats(c, slots * b->dim_k * GDN_PANEL);
}

size_t gdn_chunk_scratch_bytes(const struct gdn_prefill_job *job) {
  struct gdn_carver c = {NULL, 0};
  struct worker_scratch w;
  struct lane l;
  carve_lane(&c, job, &w, &l);
  return c.bytes;
}

static void run_lane_chunk(const struct gdn_prefill_job *job, struct worker_scratch *w, const struct lane *l,
                           int64_t token, int64_t end) {
  const struct gdn_batch *b = job->batch;
  struct gdn_chunk *k = &w->chunk;
  if (end - token < job->ctx->kernels.chunk_min) {
    run_short_chunk(job, w, l, token, end);
    return;
  }
  k->next_n = (int)(gdn_chunk_end(b, l->task.seq, end) - end);
  make_qk(job, k, l->task.head, token, end);
  struct gdn_columns c;
  GDN_EACH_COLUMNS(b, &l->task, b->dim_v, u, c) {
    /* The first columns of the task fetch the next k, the last ones the next q; single ones fetch both. */
    const int first = u == l->task.unit, last = u + c.n_cols / GDN_PANEL == l->task.unit + l->task.n_units;
    k->next_k = first ? gdn_array_rows(&b->k, end, l->task.head) : (struct gdn_rows){NULL, 0, 0};
    k->next_q = last ? gdn_array_rows(&b->q, end, l->task.head) : (struct gdn_rows){NULL, 0, 0};
    k->next_v = gdn_array_rows(&b->v, end, c.head);
    make_head(job, k, c.head, token);
    point_to_state(b, l, c.head, k);
    scan_columns(job, w, k, l->task.seq, &c, token);
  }
}

void gdn_chunk_task(const struct gdn_prefill_job *job, const struct gdn_task *t, char *scratch) {
  const struct gdn_batch *b = job->batch;
  struct gdn_carver carver = {scratch, 0};
  struct worker_scratch w;
  struct lane l = {.task = *t, .first_head = (t->unit - lead_units(b, t)) / (b->dim_v / GDN_PANEL)};
  carve_lane(&carver, job, &w, &l);
  int64_t token = gdn_batch_start(b, t->seq), stop = token + gdn_batch_len(b, t->seq);
  if (!starts_from_nothing(job, t->seq, token)) {
    gdn_states_load(job, t, lane_states(b, &l));
    move_states(job, &l, &w.chunk, job->ctx->kernels.chunk_begin);
  }
  for (int64_t end; token < stop; token = end) {
    end = gdn_chunk_end(b, t->seq, token);
    run_lane_chunk(job, &w, &l, token, end);
    if (end == stop) store_states(job, &l, &w.chunk, token);
  }
}

/* ---- windows ---- */

#define WINDOW_MIN 8
#define WINDOW_MAX 64

static void carve_slot(struct gdn_carver *c, const struct gdn_batch *b, struct gdn_chunk *k, int group_head_v) {
  carve_qk(c, b, k);
  for (int i = 0; i <= group_head_v; i++) carve_head(c, k);
}

static size_t slot_bytes(const struct gdn_batch *b) {
  struct gdn_carver c = {NULL, 0};
  struct gdn_chunk k;
  carve_slot(&c, b, &k, b->n_heads_v / b->n_heads_k - 1);
  return c.bytes;
}

/* Tasks that a lane is cut into, so that the fullest worker has least to do; the fewest of those. */
static int stage2_parts(int n_lanes, int n_units, int n_workers) {
  int best = 1;
  int64_t best_time = INT64_MAX;
  for (int parts = 1; parts <= n_units; parts++) {
    int64_t rounds = ((int64_t)n_lanes * parts + n_workers - 1) / n_workers;
    int64_t time = rounds * ((n_units + parts - 1) / parts);
    if (time < best_time) {
      best_time = time;
      best = parts;
    }
  }
  return best;
}

static void carve_windows(struct gdn_carver *c, const struct gdn_prefill_job *job, struct gdn_windows *w) {
  const struct gdn_batch *b = job->batch;
  const int n_workers = job->ctx->n_threads, group = b->n_heads_v / b->n_heads_k;
  const int64_t state = (int64_t)group * b->dim_v * b->dim_k;
  w->lanes = gdn_carve(c, (size_t)w->n_lanes * sizeof *w->lanes);
  for (int p = 0; p < 2; p++) {
    w->shares[p] = gdn_carve(c, (size_t)n_workers * sizeof *w->shares[p]);
    w->local[p] = gdn_carve(c, (size_t)n_workers * sizeof *w->local[p]);
  }
  for (int i = 0; i < w->n_lanes; i++) {
    struct gdn_window_lane l = {.state = gdn_carve_floats(c, state),
                                .state_op = gdn_carve_floats(c, state),
                                .slots = gdn_carve(c, 2 * (size_t)w->window * w->slot_bytes)};
    if (c->base) w->lanes[i] = l;
  }
}

/* The lanes of all sequences that the plan leaves to windows. */
static void place_lanes(const struct gdn_prefill_job *job, struct gdn_windows *w) {
  const struct gdn_plan *plan = &job->ctx->plan;
  for (int i = 0; i < w->n_lanes; i++) {
    w->lanes[i].seq = plan->order[i / job->batch->n_heads_k];
    w->lanes[i].head = i % job->batch->n_heads_k;
  }
}

static void share_out(struct gdn_share *shares, int n_workers, int64_t n) {
  for (int i = 0; i < n_workers; i++) {
    atomic_store_explicit(&shares[i].next, n * i / n_workers, memory_order_relaxed);
    shares[i].end = n * (i + 1) / n_workers;
  }
}

/* A worker's share of stage 1 is what its share of stage 2 reads next: most of it stays in its core's cache. */
static void ready_phase(const struct gdn_prefill_job *job, int64_t phase) {
  const struct gdn_windows *w = job->windows;
  const int n_workers = job->ctx->n_threads;
  share_out(w->shares[phase & 1], n_workers, phase < 0 ? 0 : (int64_t)w->n_lanes * w->parts);
  share_out(w->local[phase & 1], n_workers, phase + 1 < w->n_windows ? (int64_t)w->n_lanes * w->window : 0);
}

size_t gdn_windows_bytes(const struct gdn_prefill_job *job, struct gdn_windows *w) {
  const struct gdn_batch *b = job->batch;
  const struct gdn_plan *plan = &job->ctx->plan;
  int64_t most = 0;
  w->n_lanes = (int)(plan->n_wide * b->n_heads_k);
  w->parts = stage2_parts(w->n_lanes, plan->n_units, job->ctx->n_threads);
  w->window = (2 * job->ctx->n_threads + w->n_lanes - 1) / w->n_lanes;
  w->window = w->window < WINDOW_MIN ? WINDOW_MIN : w->window > WINDOW_MAX ? WINDOW_MAX : w->window;
  w->slot_bytes = slot_bytes(b);
  for (int64_t i = 0; i < plan->n_wide; i++) {
    int64_t n = gdn_seq_chunks(b, plan->order[i]);
    most = n > most ? n : most;
  }
  w->n_windows = (most + w->window - 1) / w->window;
  struct gdn_carver c = {NULL, 0};
  carve_windows(&c, job, w);
  return c.bytes;
}

void gdn_windows_begin(struct gdn_prefill_job *job, struct gdn_windows *w, char *memory) {
  struct gdn_carver c = {memory, 0};
  carve_windows(&c, job, w);
  place_lanes(job, w);
  job->windows = w;
  ready_phase(job, -1);
  ready_phase(job, 0);
}

/* Batch tokens [*token, *end) of chunk i of a sequence; 0 if it has none. */
static int chunk_tokens(const struct gdn_batch *b, int64_t seq, int64_t i, int64_t *token, int64_t *end) {
  int64_t start = gdn_batch_start(b, seq);
  if (i >= gdn_seq_chunks(b, seq)) return 0;
  *token = i ? start + i * GDN_CHUNK - gdn_batch_prefix(b, seq) % GDN_CHUNK : start;
  *end = gdn_chunk_end(b, seq, *token);
  return 1;
}

static char *window_slot(const struct gdn_windows *w, const struct gdn_window_lane *l, int64_t chunk) {
  int64_t window = chunk / w->window;
  return l->slots + ((window & 1) * w->window + chunk % w->window) * (int64_t)w->slot_bytes;
}

/* Touches part i of n of the q and k rows that the worker takes next. */
static void fetch_rows(const struct gdn_array *a, int head, int dim, int64_t token, int64_t end, int i, int n) {
  const int64_t rows = end - token;
  struct gdn_rows r = gdn_array_rows(a, token, head);
  const int bytes = gdn_dtype_bytes(r.dtype);
  for (int64_t t = rows * i / n; t < rows * (i + 1) / n; t++)
    for (int at = 0; at < dim * bytes; at += GDN_LINE_BYTES)
      __builtin_prefetch((const char *)r.data + t * r.stride_elems * bytes + at, 0, 2);
}

/* Stage 1 of one chunk and q/k head; chunk next of lane next_lane follows. */
static void make_slot(const struct gdn_prefill_job *job, struct worker_scratch *s, const struct gdn_window_lane *l,
                      int64_t chunk, const struct gdn_window_lane *next_lane, int64_t next) {
  const struct gdn_batch *b = job->batch;
  const int group = b->n_heads_v / b->n_heads_k;
  int64_t token, end;
  if (!chunk_tokens(b, l->seq, chunk, &token, &end) || end - token < job->ctx->kernels.chunk_min) return;
  struct gdn_carver c = {window_slot(job->windows, l, chunk), 0};
  s->chunk.next_n = 0;
  carve_qk(&c, b, &s->chunk);
  make_qk(job, &s->chunk, l->head, token, end);
  int64_t next_token = 0, next_end = 0;
  if (next_lane) chunk_tokens(b, next_lane->seq, next, &next_token, &next_end);
  for (int i = 0; i < group; i++) {
    if (next_end > next_token) {
      fetch_rows(&b->k, next_lane->head, b->dim_k, next_token, next_end, i, group);
      fetch_rows(&b->q, next_lane->head, b->dim_k, next_token, next_end, i, group);
    }
    carve_head(&c, &s->chunk);
    make_head(job, &s->chunk, l->head * group + i, token);
  }
}

/* Stage 2 of one chunk on the units of task t. */
static void scan_slot(const struct gdn_prefill_job *job, struct worker_scratch *s, const struct lane *l, char *slot,
                      int64_t token, int64_t end) {
  const struct gdn_batch *b = job->batch;
  struct gdn_chunk *k = &s->chunk;
  struct gdn_columns c;
  k->n = (int)(end - token);
  k->n16 = (k->n + GDN_BLOCK - 1) / GDN_BLOCK * GDN_BLOCK;
  GDN_EACH_COLUMNS(b, &l->task, b->dim_v, u, c) {
    struct gdn_carver carver = {slot, 0};
    carve_slot(&carver, b, k, group_head(b, c.head));
    k->next_n = (int)(gdn_chunk_end(b, l->task.seq, end) - end);
    k->next_q.data = k->next_k.data = NULL;
    k->next_v = gdn_array_rows(&b->v, end, c.head);
    point_to_state(b, l, c.head, k);
    scan_columns(job, s, k, l->task.seq, &c, token);
  }
}

/* One window of one part of a lane. */
static void scan_window(const struct gdn_prefill_job *job, struct worker_scratch *s, int64_t item, int64_t window) {
  const struct gdn_batch *b = job->batch;
  const struct gdn_windows *w = job->windows;
  const struct gdn_window_lane *shared = &w->lanes[item / w->parts];
  const int n_units = job->ctx->plan.n_units, part = (int)(item % w->parts);
  const int first = n_units * part / w->parts, end_unit = n_units * (part + 1) / w->parts;
  struct lane l = {{shared->seq, shared->head, first, end_unit - first}, 0, shared->state, shared->state_op};
  const int64_t n_chunks = gdn_seq_chunks(b, shared->seq);
  if (!window && !starts_from_nothing(job, shared->seq, gdn_batch_start(b, shared->seq))) {
    gdn_states_load(job, &l.task, lane_states(b, &l));
    move_states(job, &l, &s->chunk, job->ctx->kernels.chunk_begin);
  }
  for (int64_t i = window * w->window; i < (window + 1) * w->window && i < n_chunks; i++) {
    int64_t token, end;
    chunk_tokens(b, shared->seq, i, &token, &end);
    if (end - token < job->ctx->kernels.chunk_min)
      run_short_chunk(job, s, &l, token, end);
    else
      scan_slot(job, s, &l, window_slot(w, shared, i), token, end);
    if (i == n_chunks - 1) store_states(job, &l, &s->chunk, token);
  }
}

static int64_t take(struct gdn_share *share) {
  return atomic_fetch_add_explicit(&share->next, 1, memory_order_relaxed);
}

/* What is left of a share of stage 1, for the window from first_chunk on. */
static void make_slots(const struct gdn_prefill_job *job, struct worker_scratch *s, struct gdn_share *share,
                       int64_t first_chunk) {
  const struct gdn_windows *w = job->windows;
  int64_t item = take(share);
  while (item < share->end) {
    const int64_t next = take(share);
    make_slot(job, s, &w->lanes[item / w->window], first_chunk + item % w->window,
              next < share->end ? &w->lanes[next / w->window] : NULL, first_chunk + next % w->window);
    item = next;
  }
}

void gdn_windows_run(const struct gdn_prefill_job *job, int worker, int n_workers, char *scratch) {
  const struct gdn_windows *w = job->windows;
  struct gdn_carver c = {scratch, 0};
  struct worker_scratch s;
  carve_worker(&c, job, &s);
  for (int64_t phase = -1; phase < w->n_windows; phase++) {
    if (worker == 0 && phase >= 0) ready_phase(job, phase + 1);
    for (int i = 0; i < n_workers; i++) {
      struct gdn_share *share = &w->shares[phase & 1][(worker + i) % n_workers];
      for (int64_t item = take(share); item < share->end; item = take(share)) scan_window(job, &s, item, phase);
    }
    for (int i = 0; i < n_workers; i++)
      make_slots(job, &s, &w->local[phase & 1][(worker + i) % n_workers], (phase + 1) * w->window);
    if (phase + 1 < w->n_windows) gdn_team_barrier(job->ctx->team);
  }
}
