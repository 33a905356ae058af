/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench halves: two contexts side by side on disjoint cpus, each called by a thread of its own, against each alone.
 * Controls run on the workers of the same contexts, but without calls: what the machine itself gives two halves. */
#include "bench.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "f32_products.h"
#include "measure.h"
#include "tiles.h"

#define SLICE_US 20000.0
#define ROUNDS_MAX 4096
#define CPUS_MAX 8192
#define LIST_BYTES 4096

enum { WORK_PREFILL, WORK_PRODUCTS, WORK_DECODE, WORK_SWEEP, N_WORKS };
enum { FIRST, SECOND, N_SIDES };
enum { ALONE, BESIDE, N_COMPANIES };

static const char *const work_names[] = {"prefill", "products", "decode", "sweep"};
/* Which control shows what the machine gives to a call; -1 = it is one. */
static const int work_controls[] = {WORK_PRODUCTS, -1, WORK_SWEEP, -1};

/* ---- one context, its caller and what they run ---- */

struct halves;

struct side {
  struct halves *halves;
  int index;
  char cpus[LIST_BYTES];
  struct bench_session session;
  struct bench_batch prompts, states; /* of prefill and decode */
  gdn_prefill_args prefill;
  gdn_decode_args decode;
  struct tiles *tiles; /* null: products are f32 */
  struct f32_products f32;
  bench_scale_fn scale;
  float factor; /* 1, which the compiler does not know: states keep their values */
  atomic_llong n_units;
  pthread_t caller;
  atomic_int ready, finished;
  int status;
  double per_s; /* calls or units of the last slice */
};

/* The callers stand at two barriers; between them those of turn run the work. */
struct halves {
  const struct bench_options *options;
  struct side sides[N_SIDES];
  pthread_barrier_t begin, end;
  int work; /* -1: the callers end */
  bool turn[N_SIDES];
  _Atomic double end_us; /* of the slice */
  int64_t n_rounds;
  double per_s[N_WORKS][N_SIDES][N_COMPANIES][ROUNDS_MAX];
};

static int run_call(struct side *s) {
  if (s->halves->work == WORK_PREFILL) {
    return bench_check(gdn_prefill(s->session.ctx, &s->prefill), "gdn_prefill");
  }
  return bench_check(gdn_decode(s->session.ctx, &s->decode), "gdn_decode");
}

static int64_t products_until(const struct side *s, int worker, double end_us) {
  int64_t n = 0;
  do {
    f32_products_one(&s->f32, worker);
    n++;
  } while (measure_now_us() < end_us);
  return n;
}

/* A worker goes round and round through its part of the states, head by head. */
static int64_t sweep_until(const struct side *s, int worker, int n_workers, double end_us) {
  const int64_t head_elems = (int64_t)s->states.dim_k * s->states.dim_v;
  const int64_t n_heads = s->states.n_seqs * s->states.v_heads;
  const int64_t first = n_heads * worker / n_workers, end = n_heads * (worker + 1) / n_workers;
  int64_t n = 0;
  while (first < end && measure_now_us() < end_us) {
    s->scale(s->states.states + (first + n % (end - first)) * head_elems, head_elems, s->factor);
    n++;
  }
  return n;
}

static void control_worker(void *arg, int32_t worker, int32_t n_workers) {
  struct side *s = arg;
  const double end_us = atomic_load(&s->halves->end_us);
  const int64_t n = s->halves->work == WORK_SWEEP ? sweep_until(s, worker, n_workers, end_us)
                    : s->tiles                    ? tiles_chunks_until(s->tiles, worker, end_us)
                                                  : products_until(s, worker, end_us);
  atomic_fetch_add(&s->n_units, n);
}

/* Waits for the other caller where both run, so that either is measured beside the other from first to last. */
static void meet(struct side *s, bool both) {
  struct side *other = &s->halves->sides[!s->index];
  atomic_store(&s->ready, 1);
  while (both && !atomic_load(&other->ready)) {
    sched_yield();
  }
  atomic_store(&s->halves->end_us, measure_now_us() + SLICE_US);
}

static void run_slice(struct side *s) {
  struct halves *h = s->halves;
  const bool both = h->turn[FIRST] && h->turn[SECOND], control = work_controls[h->work] < 0;
  int64_t n = 0;
  s->status = control ? BENCH_OK : run_call(s); /* wakes the workers, fills the caches */
  meet(s, both);
  const double start_us = measure_now_us();
  atomic_store(&s->n_units, 0);
  while (s->status == BENCH_OK && (n == 0 || measure_now_us() < atomic_load(&h->end_us))) {
    s->status = control ? bench_check(gdn_ctx_run(s->session.ctx, control_worker, s), "gdn_ctx_run") : run_call(s);
    n++;
  }
  s->per_s = (double)(control ? atomic_load(&s->n_units) : n) / (measure_now_us() - start_us) * 1e6;
  atomic_store(&s->finished, 1);
  while (both && !control && s->status == BENCH_OK && !atomic_load(&h->sides[!s->index].finished)) {
    s->status = run_call(s);
  }
}

static void *caller_main(void *arg) {
  struct side *s = arg;
  struct halves *h = s->halves;
  for (;;) {
    pthread_barrier_wait(&h->begin);
    if (h->work < 0) {
      return NULL;
    }
    if (h->turn[s->index]) {
      run_slice(s);
    }
    pthread_barrier_wait(&h->end);
  }
}

/* ---- rounds ---- */

static int measure_slice(struct halves *h, int work, bool first, bool second) {
  h->work = work;
  h->turn[FIRST] = first;
  h->turn[SECOND] = second;
  for (int i = 0; i < N_SIDES; i++) {
    h->sides[i].status = BENCH_OK;
    atomic_store(&h->sides[i].ready, 0);
    atomic_store(&h->sides[i].finished, 0);
  }
  pthread_barrier_wait(&h->begin);
  pthread_barrier_wait(&h->end);
  for (int i = 0; i < N_SIDES; i++) {
    if (h->turn[i]) {
      h->per_s[work][i][first && second ? BESIDE : ALONE][h->n_rounds] = h->sides[i].per_s;
    }
  }
  return h->sides[FIRST].status != BENCH_OK ? h->sides[FIRST].status : h->sides[SECOND].status;
}

static int measure_rounds(struct halves *h) {
  const double start_us = measure_now_us();
  int status = BENCH_OK;
  for (h->n_rounds = 0; status == BENCH_OK && h->n_rounds < ROUNDS_MAX; h->n_rounds++) {
    const double spent = (measure_now_us() - start_us) * 1e-6;
    if (h->n_rounds >= 5 && spent >= h->options->seconds) {
      break;
    }
    measure_progress("halves: round %lld, %.1f of %.1f s", (long long)h->n_rounds + 1, spent, h->options->seconds);
    for (int work = 0; work < N_WORKS && status == BENCH_OK; work++) {
      for (int who = 1; who <= 3 && status == BENCH_OK; who++) {
        status = measure_slice(h, work, who & 1, who & 2);
      }
    }
  }
  measure_progress_clear();
  return status;
}

static int measure(struct halves *h) {
  int n_callers = 0, status = BENCH_OK;
  pthread_barrier_init(&h->begin, NULL, N_SIDES + 1);
  pthread_barrier_init(&h->end, NULL, N_SIDES + 1);
  while (n_callers < N_SIDES && status == BENCH_OK) {
    if (pthread_create(&h->sides[n_callers].caller, NULL, caller_main, &h->sides[n_callers]) == 0) {
      n_callers++;
    } else {
      status = bench_error("cannot start a calling thread");
    }
  }
  if (status != BENCH_OK) {
    exit(status); /* a lone caller waits for the other for ever */
  }
  status = measure_rounds(h);
  h->work = -1;
  pthread_barrier_wait(&h->begin);
  for (int i = 0; i < N_SIDES; i++) {
    pthread_join(h->sides[i].caller, NULL);
  }
  pthread_barrier_destroy(&h->begin);
  pthread_barrier_destroy(&h->end);
  return status;
}

/* ---- who runs where ---- */

/* The n-th of the cpus of a list such as "0-3,8"; -1 if there are fewer, or where the list ends otherwise. */
static int nth_cpu(const char *list, int n) {
  for (const char *at = list; *at >= '0' && *at <= '9'; at += *at == ',') {
    char *end = NULL;
    const long first = strtol(at, &end, 10);
    const long last = *end == '-' ? strtol(end + 1, &end, 10) : first;
    if (n <= last - first) {
      return (int)(first + n);
    }
    n -= (int)(last - first + 1);
    at = end;
  }
  return -1;
}

/* Cpus [from, to) of a list, one by one. */
static void cut_list(const char *list, int from, int to, char *cut) {
  size_t at = 0;
  for (int i = from; i < to && at < LIST_BYTES; i++) {
    at += (size_t)snprintf(cut + at, LIST_BYTES - at, "%s%d", i > from ? "," : "", nth_cpu(list, i));
  }
}

/* The cpus that the workers of one context would be bound to. */
static int halve_cores(struct halves *h) {
  struct bench_session whole;
  int status = bench_open(h->options, &whole);
  if (status != BENCH_OK) {
    return status;
  }
  int n = 0;
  while (n < CPUS_MAX && nth_cpu(whole.info.placement, n) >= 0) {
    n++;
  }
  if (!whole.info.pinned || strstr(whole.info.placement, "...") || n < 2) {
    status =
        bench_error("there are no halves of the cores (%s): name cpus with --first and --second", whole.info.placement);
  } else {
    cut_list(whole.info.placement, 0, n / 2, h->sides[FIRST].cpus);
    cut_list(whole.info.placement, n / 2, n, h->sides[SECOND].cpus);
  }
  bench_close(&whole);
  return status;
}

static int find_cpus(struct halves *h) {
  const struct bench_options *o = h->options;
  if (!o->first && !o->second) {
    return halve_cores(h);
  }
  if (!o->first || !o->second || strlen(o->first) >= LIST_BYTES || strlen(o->second) >= LIST_BYTES) {
    return bench_error("--first and --second go together, each with a list such as 0-3,8");
  }
  strcpy(h->sides[FIRST].cpus, o->first);
  strcpy(h->sides[SECOND].cpus, o->second);
  for (int i = 0, cpu; (cpu = nth_cpu(o->first, i)) >= 0 && i < CPUS_MAX; i++) {
    for (int k = 0, other; (other = nth_cpu(o->second, k)) >= 0 && k < CPUS_MAX; k++) {
      if (cpu == other) {
        return bench_error("--first %s and --second %s share cpu %d", o->first, o->second, cpu);
      }
    }
  }
  return BENCH_OK;
}

/* ---- preparation ---- */

static int make_products(struct side *s) {
  int32_t form = GDN_FORM_DEFAULT;
  int status = bench_check(gdn_prefill_form(s->session.ctx, &s->prefill, &form), "gdn_prefill");
  if (status != BENCH_OK) {
    return status;
  }
  if (form != GDN_FORM_CHUNK || strcmp(s->session.info.isa, "amx") != 0) {
    return f32_products_create(&s->f32, s->session.ctx, s->session.info.n_threads);
  }
  s->tiles = tiles_create(&s->prompts, s->session.ctx, s->session.info.n_threads);
  return s->tiles ? BENCH_OK : bench_error("out of memory for products");
}

static int prepare_side(struct halves *h, int index) {
  struct side *s = &h->sides[index];
  struct bench_options o = *h->options;
  s->halves = h;
  s->index = index;
  o.cpus = s->cpus;
  o.threads = o.threads ? (o.threads + (index == SECOND)) / 2 : 0;
  int status = bench_parse_lens(o.lens, &s->prompts);
  if (status == BENCH_OK) {
    status = bench_open(&o, &s->session);
  }
  if (status != BENCH_OK) {
    return status;
  }
  s->prompts.heads = s->states.heads = (int)o.heads;
  s->prompts.v_heads = s->states.v_heads = (int)o.v_heads;
  s->prompts.dim_k = s->states.dim_k = (int)o.dim_k;
  s->prompts.dim_v = s->states.dim_v = (int)o.dim_v;
  s->states.n_seqs = s->states.n_tokens = o.batch;
  status = batch_create(&s->prompts, s->session.ctx, false);
  if (status == BENCH_OK) {
    status = batch_create(&s->states, s->session.ctx, false);
  }
  s->prefill = bench_prefill_args(&s->prompts, o.form, o.schedule);
  s->decode = bench_decode_args(&s->states, &o);
  s->scale = bench_scale_for(s->session.info.isa);
  s->factor = 1.0f;
  return status == BENCH_OK ? make_products(s) : status;
}

static int prepare(struct halves *h) {
  int status = h->options->threads == 1 ? bench_error("--threads 1: two contexts need two") : find_cpus(h);
  for (int i = 0; i < N_SIDES && status == BENCH_OK; i++) {
    status = prepare_side(h, i);
  }
  return status;
}

/* ---- report ---- */

static double ratio(const struct halves *h, int work, int64_t round) {
  double sum[N_COMPANIES];
  for (int i = 0; i < N_COMPANIES; i++) {
    sum[i] = h->per_s[work][FIRST][i][round] + h->per_s[work][SECOND][i][round];
  }
  return sum[BESIDE] / sum[ALONE];
}

static struct measure_stats ratios(const struct halves *h, int work) {
  static double values[ROUNDS_MAX];
  for (int64_t i = 0; i < h->n_rounds; i++) {
    values[i] = ratio(h, work, i);
  }
  return measure_percentiles(values, h->n_rounds);
}

/* Of the ratio of a call over its control's, round by round. */
static double of_control(const struct halves *h, int work) {
  static double values[ROUNDS_MAX];
  for (int64_t i = 0; i < h->n_rounds; i++) {
    values[i] = ratio(h, work, i) / ratio(h, work_controls[work], i);
  }
  return measure_percentiles(values, h->n_rounds).median_us;
}

static double median_per_s(const struct halves *h, int work, int side, int company) {
  static double values[ROUNDS_MAX];
  memcpy(values, h->per_s[work][side][company], sizeof values);
  return measure_percentiles(values, h->n_rounds).median_us;
}

static void side_json(struct json *j, const struct halves *h, int work, int side) {
  json_begin_object(j, side == FIRST ? "first" : "second");
  json_number(j, "alone_per_s", median_per_s(h, work, side, ALONE));
  json_number(j, "beside_per_s", median_per_s(h, work, side, BESIDE));
  json_end_object(j);
}

static void print_json(const struct halves *h) {
  struct json j = {.file = stdout};
  const struct bench_options *o = h->options;
  const struct side *s = h->sides;
  json_begin_object(&j, NULL);
  json_string(&j, "command", "halves");
  json_string(&j, "first", s[FIRST].cpus);
  json_string(&j, "second", s[SECOND].cpus);
  json_int(&j, "first_threads", s[FIRST].session.info.n_threads);
  json_int(&j, "second_threads", s[SECOND].session.info.n_threads);
  json_string(&j, "isa", s[FIRST].session.info.isa);
  json_string(&j, "lens", o->lens);
  json_int(&j, "batch", o->batch);
  json_int(&j, "heads", o->heads);
  json_int(&j, "v_heads", o->v_heads);
  json_int(&j, "dim_k", o->dim_k);
  json_int(&j, "dim_v", o->dim_v);
  json_int(&j, "rounds", h->n_rounds);
  json_number(&j, "slice_us", SLICE_US);
  json_string(&j, "products", s[FIRST].tiles ? "tiles" : "f32 64 x 128 x 128");
  json_begin_object(&j, "works");
  for (int work = 0; work < N_WORKS; work++) {
    const struct measure_stats r = ratios(h, work);
    json_begin_object(&j, work_names[work]);
    json_number(&j, "ratio", r.median_us);
    json_number(&j, "ratio_p10", r.p10_us);
    json_number(&j, "ratio_p90", r.p90_us);
    if (work_controls[work] >= 0) {
      json_number(&j, "of_control", of_control(h, work));
    }
    side_json(&j, h, work, FIRST);
    side_json(&j, h, work, SECOND);
    json_end_object(&j);
  }
  json_end_object(&j);
  bench_conditions_json(&j, &s[FIRST].session);
  json_end_object(&j);
}

static int print_text(const struct halves *h) {
  static const char *const headers[] = {"", "ratio", "p10", "p90", "of control", "alone/s", "beside/s"};
  const struct side *s = h->sides;
  bench_conditions_print(&s[FIRST].session);
  printf("prefill of %s, decode of %lld, on cpus %s and %s, %lld rounds\n\n", h->options->lens,
         (long long)h->options->batch, s[FIRST].cpus, s[SECOND].cpus, (long long)h->n_rounds);
  struct table t;
  table_begin(&t, 7, headers);
  for (int work = 0; work < N_WORKS; work++) {
    const struct measure_stats r = ratios(h, work);
    table_cell(&t, "%s%s", work_names[work], work_controls[work] < 0 ? " (control)" : "");
    table_cell(&t, "%.3f", r.median_us);
    table_cell(&t, "%.3f", r.p10_us);
    table_cell(&t, "%.3f", r.p90_us);
    table_cell(&t, work_controls[work] < 0 ? "" : "%.3f", work_controls[work] < 0 ? 0.0 : of_control(h, work));
    for (int i = 0; i < N_COMPANIES; i++) {
      table_cell(&t, "%.1f", median_per_s(h, work, FIRST, i) + median_per_s(h, work, SECOND, i));
    }
  }
  return table_end(&t, stdout) ? BENCH_OK : bench_error("out of memory for the table");
}

int bench_halves(const struct bench_options *o) {
  static struct halves h;
  h.options = o;
  int status = prepare(&h);
  if (status == BENCH_OK) {
    status = measure(&h);
  }
  if (status == BENCH_OK && o->json) {
    print_json(&h);
  } else if (status == BENCH_OK) {
    status = print_text(&h);
  }
  for (int i = 0; i < N_SIDES; i++) {
    tiles_destroy(h.sides[i].tiles);
    f32_products_destroy(&h.sides[i].f32);
    batch_destroy(&h.sides[i].prompts);
    batch_destroy(&h.sides[i].states);
    bench_close(&h.sides[i].session);
  }
  return status;
}
