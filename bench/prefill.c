/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench prefill: one call against the time that its operations take as bare matrix products. */
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "f32_products.h"
#include "measure.h"
#include "tiles.h"

#define SEQS_MAX (1 << 24)

/* ---- lengths: "4096", "512x8", "37,64,100" ---- */

static bool take_number(const char **at, int64_t min, int64_t max, int64_t *value) {
  char *end = NULL;
  if (**at < '0' || **at > '9') {
    return false;
  }
  errno = 0;
  *value = strtoll(*at, &end, 10);
  *at = end;
  return errno == 0 && *value >= min && *value <= max;
}

/* Walks the list; cu_seqlens may be null to count only. */
static int walk_lens(const char *lens, int32_t *cu_seqlens, int64_t *n_seqs, int64_t *n_tokens) {
  const char *at = lens;
  *n_seqs = 0;
  *n_tokens = 0;
  for (;;) {
    int64_t len = 0;
    int64_t copies = 1;
    if (!take_number(&at, 0, INT32_MAX, &len) || (*at == 'x' && (at++, !take_number(&at, 1, SEQS_MAX, &copies)))) {
      break;
    }
    if (*n_seqs + copies > SEQS_MAX || *n_tokens + copies * len > INT32_MAX) {
      return bench_error("--lens %s: more than %d sequences or %d tokens", lens, SEQS_MAX, INT32_MAX);
    }
    for (int64_t i = 0; i < copies && cu_seqlens; i++) {
      cu_seqlens[*n_seqs + i + 1] = (int32_t)(*n_tokens + (i + 1) * len);
    }
    *n_seqs += copies;
    *n_tokens += copies * len;
    if (*at == '\0') {
      return BENCH_OK;
    }
    if (*at++ != ',') {
      break;
    }
  }
  return bench_error("--lens %s: expected lengths such as 4096, 512x8 or 37,64,100", lens);
}

int bench_parse_lens(const char *lens, struct bench_batch *b) {
  int status = walk_lens(lens, NULL, &b->n_seqs, &b->n_tokens);
  if (status != BENCH_OK) {
    return status;
  }
  if (b->n_tokens == 0) {
    return bench_error("--lens %s: no tokens to time", lens);
  }
  b->cu_seqlens = calloc((size_t)b->n_seqs + 1, sizeof *b->cu_seqlens);
  if (!b->cu_seqlens) {
    return bench_error("out of memory for %lld sequences", (long long)b->n_seqs);
  }
  return walk_lens(lens, b->cu_seqlens, &b->n_seqs, &b->n_tokens);
}

/* ---- the limit: products of the usual size, operands in cache ---- */

#define PRODUCTS_MAX 16384

/* As many products as the call has operations, so that both are timed over alike stretches; at least a few per worker,
 * and at most so many that long calls do not wait for the reference. Workers claim them one by one. */
struct products {
  gdn_ctx *ctx;
  struct f32_products f32;
  long long n;
  atomic_llong next;
};

static void products_worker(void *arg, int32_t worker, int32_t n_workers) {
  struct products *p = arg;
  (void)n_workers;
  while (atomic_fetch_add(&p->next, 1) < p->n) {
    f32_products_one(&p->f32, worker);
  }
}

static int products_run(void *arg) {
  struct products *p = arg;
  atomic_store(&p->next, 0);
  return bench_check(gdn_ctx_run(p->ctx, products_worker, p), "gdn_ctx_run");
}

static double call_flops(const struct bench_batch *b) {
  return 8.0 * b->dim_k * b->dim_v * (double)b->n_tokens * b->v_heads;
}

static int products_create(struct products *p, const struct bench_session *s, const struct bench_batch *b) {
  double least = 16.0 * s->info.n_threads;
  p->ctx = s->ctx;
  p->n = (long long)fmin(fmax(ceil(call_flops(b) / F32_PRODUCT_FLOPS), least), fmax(PRODUCTS_MAX, least));
  return f32_products_create(&p->f32, s->ctx, s->info.n_threads);
}

/* ---- the call ---- */

struct call {
  gdn_ctx *ctx;
  gdn_prefill_args args;
};

static int call_run(void *arg) {
  struct call *c = arg;
  return bench_check(gdn_prefill(c->ctx, &c->args), "gdn_prefill");
}

gdn_prefill_args bench_prefill_args(const struct bench_batch *b, int32_t form, int32_t schedule) {
  gdn_prefill_args args = batch_prefill_args(b, form);
  args.schedule = schedule;
  args.final_state = (gdn_states){.data = b->states, .n_rows = b->n_seqs, .dtype = GDN_F32};
  return args;
}

static struct call make_call(const struct bench_batch *b, gdn_ctx *ctx, int32_t form, int32_t schedule) {
  return (struct call){.ctx = ctx, .args = bench_prefill_args(b, form, schedule)};
}

/* ---- one measurement and its report ---- */

enum { CASE_CALL, CASE_PRODUCTS, CASE_TILES, CASE_PEAK, CASE_VERSUS, CASE_PLAIN, CASE_OTHER_FORM, N_CASES };

struct prefill {
  const struct bench_options *options;
  struct bench_session session;
  struct bench_batch batch;
  struct products products;
  struct tiles *tiles; /* null unless the call is one of tile products */
  struct plain *plain;
  struct bench_session against; /* the context of --versus */
  struct call call, other, versus;
  int32_t form, other_form;           /* which the two calls take */
  double plain_rel_l2;                /* plain C against the call */
  uint64_t scratch_bytes;             /* after the calls of the default or asked form only */
  struct measure_case cases[N_CASES]; /* of which run is null where a case is not asked for */
};

static double limit_us(const struct prefill *p) {
  if (p->tiles) {
    return p->cases[CASE_TILES].stats.median_us;
  }
  double flops = F32_PRODUCT_FLOPS * (double)p->products.n;
  return p->cases[CASE_PRODUCTS].stats.median_us * call_flops(&p->batch) / flops;
}

/* Guards the baseline against being fast by being wrong. */
static int compare_plain(struct prefill *p) {
  int status = plain_run(p->plain);
  if (status == BENCH_OK) {
    status = call_run(&p->call);
  }
  if (status != BENCH_OK) {
    return status;
  }
  double difference = 0;
  double norm = 0;
  int64_t n = p->batch.n_tokens * p->batch.v_heads * p->batch.dim_v;
  for (int64_t i = 0; i < n; i++) {
    double x = bench_bf16_to_f32(p->batch.out[i]);
    double y = bench_bf16_to_f32(p->batch.plain_out[i]);
    difference += (x - y) * (x - y);
    norm += x * x;
  }
  p->plain_rel_l2 = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
  return p->plain_rel_l2 < 0.02 ? BENCH_OK
                                : bench_error("the plain C recurrence differs from the library: %g", p->plain_rel_l2);
}

static int prepare(struct prefill *p) {
  const struct bench_options *o = p->options;
  struct bench_batch *b = &p->batch;
  int status = bench_parse_lens(o->lens, b);
  if (status == BENCH_OK) {
    status = bench_open(o, &p->session);
  }
  if (status != BENCH_OK) {
    return status;
  }
  gdn_ctx *ctx = p->session.ctx;
  b->heads = (int)o->heads;
  b->v_heads = (int)o->v_heads;
  b->dim_k = (int)o->dim_k;
  b->dim_v = (int)o->dim_v;
  status = batch_create(b, ctx, o->baseline);
  if (status != BENCH_OK) {
    return status;
  }
  p->call = make_call(b, ctx, o->form, o->schedule);
  status = bench_check(gdn_prefill_form(ctx, &p->call.args, &p->form), "gdn_prefill");
  if (status == BENCH_OK) {
    status = products_create(&p->products, &p->session, b);
  }
  if (status == BENCH_OK && p->form == GDN_FORM_CHUNK && strcmp(p->session.info.isa, "amx") == 0) {
    p->tiles = tiles_create(b, ctx, p->session.info.n_threads);
    status = p->tiles ? BENCH_OK : bench_error("out of memory for reference products");
  }
  if (status == BENCH_OK && o->versus) {
    struct bench_options against = *o;
    against.isa = o->versus;
    status = bench_open(&against, &p->against);
    p->versus = make_call(b, p->against.ctx, GDN_FORM_DEFAULT, o->schedule);
  }
  p->other_form = p->form == GDN_FORM_CHUNK ? GDN_FORM_RECURRENT : GDN_FORM_CHUNK;
  p->other = make_call(b, ctx, p->other_form, o->schedule);
  if (status == BENCH_OK && o->baseline) {
    p->plain = plain_create(b, ctx, p->session.info.isa, p->session.info.n_threads);
    status = p->plain ? compare_plain(p) : bench_error("out of memory for the plain C recurrence");
  }
  return status;
}

static int measure(struct prefill *p) {
  p->cases[CASE_CALL] = (struct measure_case){.run = call_run, .arg = &p->call};
  p->cases[CASE_PRODUCTS] = (struct measure_case){.run = products_run, .arg = &p->products};
  if (p->tiles) {
    p->cases[CASE_TILES] = (struct measure_case){.run = tiles_products_run, .arg = p->tiles};
    p->cases[CASE_PEAK] = (struct measure_case){.run = tiles_peak_run, .arg = p->tiles};
  }
  if (p->options->versus) {
    p->cases[CASE_VERSUS] = (struct measure_case){.run = call_run, .arg = &p->versus};
  }
  if (p->options->baseline) {
    p->cases[CASE_PLAIN] = (struct measure_case){.run = plain_run, .arg = p->plain};
    p->cases[CASE_OTHER_FORM] = (struct measure_case){.run = call_run, .arg = &p->other};
  }
  int status = call_run(&p->call);
  p->scratch_bytes = bench_scratch_bytes(&p->session);
  if (status == BENCH_OK) {
    status = measure_interleaved(p->cases, N_CASES, p->options->seconds, "prefill");
  }
  return status;
}

static void stats_json(struct json *j, const struct prefill *p, int which) {
  const struct measure_stats *s = &p->cases[which].stats;
  measure_json(j, s);
  if (which != CASE_PRODUCTS) {
    json_number(j, "tokens_per_s", (double)p->batch.n_tokens / s->median_us * 1e6);
    json_number(j, "efficiency", limit_us(p) / s->median_us);
  }
}

static double peak_tflops(const struct prefill *p) {
  return tiles_peak_flops(p->tiles) / p->cases[CASE_PEAK].stats.median_us * 1e-6;
}

static double peak_fraction(const struct prefill *p) {
  return tiles_nominal_flops(&p->batch) / p->cases[CASE_CALL].stats.median_us * 1e-6 / peak_tflops(p);
}

static void tiles_json(struct json *j, const struct prefill *p) {
  if (!p->tiles) {
    json_null(j, "peak_tflops");
    json_null(j, "peak_fraction");
    return;
  }
  json_number(j, "peak_tflops", peak_tflops(p));
  json_number(j, "peak_fraction", peak_fraction(p));
}

static void versus_json(struct json *j, const struct prefill *p) {
  if (!p->options->versus) {
    json_null(j, "versus");
    return;
  }
  const struct measure_stats *s = &p->cases[CASE_VERSUS].stats;
  json_begin_object(j, "versus");
  json_string(j, "isa", p->against.info.isa);
  json_number(j, "median_us", s->median_us);
  json_number(j, "speedup", s->median_us / p->cases[CASE_CALL].stats.median_us);
  json_end_object(j);
}

static void baseline_json(struct json *j, const struct prefill *p) {
  if (!p->options->baseline) {
    json_null(j, "baseline");
    return;
  }
  int recurrent = p->form == GDN_FORM_RECURRENT ? CASE_CALL : CASE_OTHER_FORM;
  int chunk = p->form == GDN_FORM_CHUNK ? CASE_CALL : CASE_OTHER_FORM;
  json_begin_object(j, "baseline");
  json_begin_object(j, "recurrent");
  stats_json(j, p, recurrent);
  json_end_object(j);
  json_begin_object(j, "chunk");
  stats_json(j, p, chunk);
  json_end_object(j);
  json_begin_object(j, "plain_c");
  stats_json(j, p, CASE_PLAIN);
  json_number(j, "out_rel_l2_to_call", p->plain_rel_l2);
  json_end_object(j);
  json_end_object(j);
}

static void print_json(const struct prefill *p) {
  struct json j = {.file = stdout};
  const struct bench_batch *b = &p->batch;
  json_begin_object(&j, NULL);
  json_string(&j, "command", "prefill");
  json_string(&j, "lens", p->options->lens);
  json_int(&j, "n_seqs", b->n_seqs);
  json_int(&j, "n_tokens", b->n_tokens);
  json_int(&j, "heads", b->heads);
  json_int(&j, "v_heads", b->v_heads);
  json_int(&j, "dim_k", b->dim_k);
  json_int(&j, "dim_v", b->dim_v);
  json_string(&j, "isa", p->session.info.isa);
  json_int(&j, "threads", p->session.info.n_threads);
  json_string(&j, "form", bench_form_name(p->form));
  json_bool(&j, "form_is_default", p->options->form == GDN_FORM_DEFAULT);
  stats_json(&j, p, CASE_CALL);
  json_number(&j, "limit_us", limit_us(p));
  json_string(&j, "limit_is",
              p->tiles ? "the call's tile products" : "the recurrent form's operations as f32 products");
  tiles_json(&j, p);
  versus_json(&j, p);
  json_int(&j, "scratch_bytes", (int64_t)p->scratch_bytes);
  json_begin_object(&j, "limit");
  json_string(&j, "product", "f32 64 x 128 x 128");
  json_string(&j, "provider", p->products.f32.gemm.jit ? "libxsmm" : "plain loop");
  json_string(&j, "libxsmm_target", bench_product_target());
  json_number(&j, "gflops", F32_PRODUCT_FLOPS * (double)p->products.n / p->cases[CASE_PRODUCTS].stats.median_us * 1e-3);
  json_int(&j, "products_per_call", p->products.n);
  stats_json(&j, p, CASE_PRODUCTS);
  json_end_object(&j);
  baseline_json(&j, p);
  bench_conditions_json(&j, &p->session);
  json_end_object(&j);
}

static void table_row(struct table *t, const struct prefill *p, int which, const char *name) {
  const struct measure_stats *s = &p->cases[which].stats;
  char grouped[32];
  table_cell(t, "%s", name);
  measure_cells(t, s, 1);
  table_cell(t, "%s", report_grouped((int64_t)((double)p->batch.n_tokens / s->median_us * 1e6), grouped));
  table_cell(t, "%.3f", limit_us(p) / s->median_us);
}

static int print_text(const struct prefill *p) {
  static const char *const headers[] = {"", "median us", "p10", "p90", "runs", "tokens/s", "efficiency"};
  const struct bench_batch *b = &p->batch;
  char grouped[32];
  char name[48];
  bench_conditions_print(&p->session);
  printf("prefill of %s (%lld tokens in %lld sequence%s), heads %d, value heads %d, K %d, V %d\n\n", p->options->lens,
         (long long)b->n_tokens, (long long)b->n_seqs, b->n_seqs == 1 ? "" : "s", b->heads, b->v_heads, b->dim_k,
         b->dim_v);
  struct table t;
  table_begin(&t, 7, headers);
  snprintf(name, sizeof name, "%s form%s", bench_form_name(p->form), p->options->form ? "" : " (default)");
  table_row(&t, p, CASE_CALL, name);
  if (p->options->versus) {
    snprintf(name, sizeof name, "tier %s", p->against.info.isa);
    table_row(&t, p, CASE_VERSUS, name);
  }
  if (p->options->baseline) {
    snprintf(name, sizeof name, "%s form", bench_form_name(p->other_form));
    table_row(&t, p, CASE_OTHER_FORM, name);
    table_row(&t, p, CASE_PLAIN, "plain C recurrence");
  }
  bool complete = table_end(&t, stdout);
  if (p->tiles) {
    printf("\nlimit %.1f us: the call's products on tiles alone, operands in cache; %.2f of the peak, %.2f TFLOP/s\n"
           "scratch %s bytes\n",
           limit_us(p), peak_fraction(p), peak_tflops(p), report_grouped((int64_t)p->scratch_bytes, grouped));
    return complete ? BENCH_OK : bench_error("out of memory for the table");
  }
  printf("\nlimit %.1f us: 8 K V operations per token and value head at the rate of %s f32 products, %.1f GFLOP/s "
         "(target %s)\nscratch %s bytes\n",
         limit_us(p), p->products.f32.gemm.jit ? "libxsmm's" : "plain loops'",
         F32_PRODUCT_FLOPS * (double)p->products.n / p->cases[CASE_PRODUCTS].stats.median_us * 1e-3,
         bench_product_target(), report_grouped((int64_t)p->scratch_bytes, grouped));
  return complete ? BENCH_OK : bench_error("out of memory for the table");
}

int bench_prefill(const struct bench_options *o) {
  struct prefill p = {.options = o};
  int status = prepare(&p);
  if (status == BENCH_OK) {
    status = measure(&p);
  }
  if (status == BENCH_OK && o->json) {
    print_json(&p);
  } else if (status == BENCH_OK) {
    status = print_text(&p);
  }
  plain_destroy(p.plain);
  tiles_destroy(p.tiles);
  bench_close(&p.against);
  f32_products_destroy(&p.products.f32);
  batch_destroy(&p.batch);
  bench_close(&p.session);
  return status;
}
