/* SPDX-License-Identifier: Apache-2.0
 * Lengths to tasks. Pure integer arithmetic: nothing here changes a bit of any result. */
#include <errno.h>
#include <string.h>

#include "engine.h"

/* Units whose states one task may hold in scratch at once: 64 x 32 KiB at most. */
#define MAX_SLOTS 64
/* Value heads in windows at once; each takes about a megabyte. */
#define WIDE_HEADS_MAX 512

static int length_class(int64_t len) {
  int c = 0;
  while (len >>= 1) c++;
  return c;
}

static int plan_grow(struct gdn_plan *plan, int64_t n_seqs) {
  if (plan->capacity >= n_seqs && plan->first_task) return 0;
  gdn_plan_free(plan);
  size_t n = (size_t)n_seqs;
  plan->order = gdn_mem_alloc(n * sizeof *plan->order);
  plan->parts = gdn_mem_alloc(n * sizeof *plan->parts);
  plan->first_task = gdn_mem_alloc((n + 1) * sizeof *plan->first_task);
  if (!plan->order || !plan->parts || !plan->first_task) {
    gdn_plan_free(plan);
    return ENOMEM;
  }
  plan->capacity = n_seqs;
  return 0;
}

void gdn_plan_free(struct gdn_plan *plan) {
  gdn_mem_free(plan->order);
  gdn_mem_free(plan->parts);
  gdn_mem_free(plan->first_task);
  memset(plan, 0, sizeof *plan);
}

/* Sequences with tokens, by falling power of two of their length, so that no long one starts last. */
static void sort_by_length(struct gdn_plan *plan, const struct gdn_batch *b) {
  int64_t count[64] = {0}, at[64];
  for (int64_t s = 0; s < b->n_seqs; s++)
    if (gdn_batch_len(b, s) > 0) count[length_class(gdn_batch_len(b, s))]++;
  int64_t n = 0;
  for (int c = 63; c >= 0; c--) {
    at[c] = n;
    n += count[c];
  }
  plan->n_order = n;
  for (int64_t s = 0; s < b->n_seqs; s++)
    if (gdn_batch_len(b, s) > 0) plan->order[at[length_class(gdn_batch_len(b, s))]++] = (int32_t)s;
}

/* Parts of a lane of len tokens if a task shall cost about target (in tokens x units, percent). */
static int lane_parts(int64_t len, int64_t target, int n_units, int grain) {
  int most = n_units / grain > 0 ? n_units / grain : 1;
  int least = (n_units + MAX_SLOTS - 1) / MAX_SLOTS;
  int64_t cost = len * n_units * 100;
  int64_t parts = target > 0 ? (cost + target - 1) / target : 1;
  if (parts > most) parts = most;
  if (parts < least) parts = least;
  return (int)parts;
}

static int64_t task_cost(int64_t len, int n_units, int parts, int prep_percent) {
  return len * ((int64_t)((n_units + parts - 1) / parts) * 100 + prep_percent);
}

/* Estimated time of the whole call if lanes are cut for target: all tasks spread evenly, and half the largest one
 * ends alone. */
static int64_t makespan(const struct gdn_plan *plan, const struct gdn_batch *b, const struct gdn_plan_options *o,
                        int64_t target) {
  int64_t sum = 0, largest = 0;
  for (int64_t i = plan->n_wide; i < plan->n_order; i++) {
    int64_t len = gdn_batch_len(b, plan->order[i]);
    int parts = lane_parts(len, target, plan->n_units, o->grain);
    int64_t cost = task_cost(len, plan->n_units, parts, o->prep_percent);
    sum += cost * parts * b->n_heads_k;
    largest = cost > largest ? cost : largest;
  }
  int64_t even = sum / o->n_threads;
  return o->n_threads == 1 ? sum : even > largest ? even + largest / 2 : largest + largest / 2;
}

/* The cost model of the schedule. All lanes of a call together cost n_tokens * n_heads_k; an even share of that is what
 * a worker should do. A lane of half a share or more leaves too few to even out: workers that others slow down would
 * end last (16 lanes on 16 shared cores: 6.3 ms as lanes, 5.5 in windows; on 8 cores 8.2 and 7.8). Such sequences run
 * in windows. Moves those sequences to the front. Windows of all their lanes are in memory at once, hence the limit. */
static void find_wide(struct gdn_plan *plan, const struct gdn_batch *b, const struct gdn_plan_options *o) {
  plan->n_wide = 0;
  if (o->schedule == GDN_SCHEDULE_LANES || (o->schedule == GDN_SCHEDULE_DEFAULT && o->n_threads == 1)) return;
  const int64_t most = o->n_threads > 16 ? 4 * o->n_threads : 64;
  for (int64_t i = 0; i < plan->n_order; i++) {
    int32_t seq = plan->order[i];
    if ((plan->n_wide + 1) * b->n_heads_k > most || (plan->n_wide + 1) * b->n_heads_v > WIDE_HEADS_MAX) return;
    if (o->schedule == GDN_SCHEDULE_DEFAULT && 2 * gdn_batch_len(b, seq) * o->n_threads < b->n_tokens * b->n_heads_k)
      continue;
    plan->order[i] = plan->order[plan->n_wide];
    plan->order[plan->n_wide++] = seq;
  }
}

/* The task size, of a few, that makes the estimated time least. */
static int64_t best_target(const struct gdn_plan *plan, const struct gdn_batch *b, const struct gdn_plan_options *o) {
  int64_t total = b->n_tokens * plan->n_units * 100 * b->n_heads_k, best = INT64_MAX, best_at = 0;
  for (int per_thread = 0; per_thread <= 8; per_thread = per_thread ? per_thread * 2 : 1) {
    int64_t target = per_thread ? total / ((int64_t)o->n_threads * per_thread) + 1 : 0;
    int64_t span = makespan(plan, b, o, target);
    if (span < best) {
      best = span;
      best_at = target;
    }
  }
  return best_at;
}

int gdn_plan_make(struct gdn_plan *plan, const struct gdn_batch *b, const struct gdn_plan_options *o) {
  if (plan_grow(plan, b->n_seqs)) return ENOMEM;
  sort_by_length(plan, b);
  find_wide(plan, b, o);
  plan->grain = o->grain;
  plan->n_units = b->n_heads_v / b->n_heads_k * (b->dim_v / GDN_PANEL);
  int64_t target = best_target(plan, b, o);
  plan->n_tasks = 0;
  plan->n_slots = 0;
  for (int64_t i = 0; i < plan->n_order; i++) {
    int parts = i < plan->n_wide ? 0 : lane_parts(gdn_batch_len(b, plan->order[i]), target, plan->n_units, o->grain);
    int slots = parts ? (plan->n_units + parts - 1) / parts + o->grain : 0;
    plan->parts[i] = parts;
    plan->first_task[i] = plan->n_tasks;
    plan->n_tasks += (int64_t)parts * b->n_heads_k;
    plan->n_slots = slots > plan->n_slots ? slots : plan->n_slots;
  }
  plan->first_task[plan->n_order] = plan->n_tasks;
  plan->claim = plan->n_tasks / ((int64_t)o->n_threads * 32);
  plan->claim = plan->claim < 1 ? 1 : plan->claim > 64 ? 64 : plan->claim;
  return 0;
}

/* Unit where part i of parts begins: even cuts, moved down to a multiple of grain. */
static int part_start(int n_units, int parts, int i, int grain) {
  if (i == parts) return n_units;
  int u = (int)((int64_t)n_units * i / parts);
  return u - u % grain;
}

struct gdn_task gdn_plan_task(const struct gdn_plan *plan, int64_t i) {
  int64_t low = 0, high = plan->n_order - 1;
  while (low < high) {
    int64_t mid = (low + high + 1) / 2;
    if (plan->first_task[mid] <= i)
      low = mid;
    else
      high = mid - 1;
  }
  int parts = plan->parts[low];
  int64_t k = i - plan->first_task[low];
  int part = (int)(k % parts);
  struct gdn_task t = {plan->order[low], (int)(k / parts), 0, 0};
  t.unit = part_start(plan->n_units, parts, part, plan->grain);
  t.n_units = part_start(plan->n_units, parts, part + 1, plan->grain) - t.unit;
  return t;
}

/* ---- stretches of a sequence ---- */

struct gdn_span gdn_span_first(const struct gdn_batch *b, int64_t seq) {
  int64_t start = gdn_batch_start(b, seq);
  return (struct gdn_span){seq, start, start, -1, start + gdn_batch_len(b, seq), 0};
}

int gdn_span_next(const struct gdn_batch *b, struct gdn_span *s) {
  if (s->end == s->stop) return 0;
  s->token = s->end;
  s->end = s->stop;
  s->checkpoint = -1;
  if (!b->checkpoint_every) return 1;
  int64_t prefix = gdn_batch_prefix(b, s->seq);
  int64_t due = (prefix / b->checkpoint_every + s->n_done + 1) * b->checkpoint_every - prefix;
  if (due > s->stop - gdn_batch_start(b, s->seq)) return 1;
  s->end = gdn_batch_start(b, s->seq) + due;
  s->checkpoint = gdn_int(&b->checkpoint_cu_starts, s->seq) + s->n_done++;
  return 1;
}

int64_t gdn_chunk_end(const struct gdn_batch *b, int64_t seq, int64_t token) {
  int64_t start = gdn_batch_start(b, seq), stop = start + gdn_batch_len(b, seq);
  int64_t end = token + GDN_CHUNK - (gdn_batch_prefix(b, seq) + token - start) % GDN_CHUNK;
  return end < stop ? end : stop;
}

int64_t gdn_seq_chunks(const struct gdn_batch *b, int64_t seq) {
  int64_t len = gdn_batch_len(b, seq);
  return len ? (gdn_batch_prefix(b, seq) % GDN_CHUNK + len + GDN_CHUNK - 1) / GDN_CHUNK : 0;
}

int gdn_plan_form(int32_t isa, int dim_k, int dim_v) {
  (void)dim_k;
  (void)dim_v;
  return isa == GDN_ISA_AMX ? GDN_FORM_CHUNK : GDN_FORM_RECURRENT;
}
