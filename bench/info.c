/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench info: all that a context tells about itself. */
#include "bench.h"

static void print_json(const struct bench_session *s) {
  struct json j = {.file = stdout};
  const gdn_info *i = &s->info;
  json_begin_object(&j, NULL);
  json_string(&j, "command", "info");
  json_string(&j, "version", gdn_version_string());
  json_string(&j, "cpu", i->cpu);
  json_string(&j, "isa", i->isa);
  json_begin_array(&j, "tiers");
  for (int t = 0; t < i->n_tiers; t++) {
    json_begin_object(&j, NULL);
    json_string(&j, "name", i->tiers[t].name);
    json_bool(&j, "available", i->tiers[t].available == 1);
    json_string(&j, "reason", i->tiers[t].reason);
    json_end_object(&j);
  }
  json_end_array(&j);
  json_int(&j, "threads", i->n_threads);
  json_int(&j, "cores", i->n_cores);
  json_bool(&j, "pinned", i->pinned == 1);
  json_string(&j, "placement", i->placement);
  json_string(&j, "product_provider", i->product_provider);
  json_string(&j, "libxsmm_version", i->libxsmm_version);
  json_int(&j, "scratch_bytes", (int64_t)i->scratch_bytes);
  bench_conditions_json(&j, s);
  json_end_object(&j);
}

static void print_text(const struct bench_session *s) {
  const gdn_info *i = &s->info;
  char grouped[32];
  report_line("version", "%s", gdn_version_string());
  report_line("processor", "%s", i->cpu);
  report_line("tier", "%s", i->isa);
  for (int t = i->n_tiers - 1; t >= 0; t--) {
    const gdn_tier_info *tier = &i->tiers[t];
    report_line(t == i->n_tiers - 1 ? "tiers" : "", "%-12s %s", tier->name,
                tier->available ? "available" : tier->reason);
  }
  report_line("threads", "%d, %s", i->n_threads, i->pinned ? "each bound to its core" : "not bound");
  report_line("cores", "%d (%s)", i->n_cores, i->placement);
  report_line("products by", "%s", i->product_provider);
  report_line("libxsmm", "%s, target %s", i->libxsmm_version, bench_product_target());
  report_line("scratch", "%s bytes", report_grouped((int64_t)i->scratch_bytes, grouped));
}

int bench_info(const struct bench_options *o) {
  struct bench_session s;
  int status = bench_open(o, &s);
  if (status != BENCH_OK) {
    return status;
  }
  if (o->json) {
    print_json(&s);
  } else {
    print_text(&s);
  }
  bench_close(&s);
  return BENCH_OK;
}
