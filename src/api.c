/* SPDX-License-Identifier: Apache-2.0
 * The public functions: check, lock, run, return. The only file that defines exported symbols. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static _Thread_local char last_error[320];

gdn_status gdn_fail(gdn_status status, const char *format, ...) {
  const int caller_errno = errno;
  va_list list;
  va_start(list, format);
  vsnprintf(last_error, sizeof last_error, format, list);
  va_end(list);
  errno = caller_errno;
  return status;
}

GDN_API const char *gdn_last_error(void) {
  return last_error;
}

GDN_API uint32_t gdn_version(void) {
  return GDN_VERSION;
}

GDN_API const char *gdn_version_string(void) {
  return TEXT(GDN_VERSION_MAJOR) "." TEXT(GDN_VERSION_MINOR) "." TEXT(GDN_VERSION_PATCH);
}

GDN_API const char *gdn_status_name(gdn_status status) {
  static const char *const names[] = {
      "GDN_OK",        "GDN_E_NULL",    "GDN_E_STRUCT_SIZE",  "GDN_E_FLAGS", "GDN_E_OPTION",
      "GDN_E_DTYPE",   "GDN_E_SIZE",    "GDN_E_DIM",          "GDN_E_HEADS", "GDN_E_STRIDE",
      "GDN_E_LENGTHS", "GDN_E_ROW",     "GDN_E_ROW_CONFLICT", "GDN_E_ALIAS", "GDN_E_VALUE",
      "GDN_E_NOMEM",   "GDN_E_THREADS", "GDN_E_FORK",         "GDN_E_PAGE",  "GDN_E_CPUS"};
  const int n = (int)(sizeof names / sizeof *names);
  return status <= 0 && status > -n ? names[-status] : "unknown status";
}

/* ---- context ---- */

/* Takes the context's lock, and lays down what the caller's arithmetic depends on, so that no call depends on it; fails
 * in a forked child, whose copy of the context has no workers. */
static gdn_status ctx_enter(gdn_ctx *ctx) {
  if (!ctx) return gdn_fail(GDN_E_NULL, "ctx is null");
  if (ctx->pid != getpid())
    return gdn_fail(GDN_E_FORK, "ctx was made by process %ld; this is its child %ld, which needs its own",
                    (long)ctx->pid, (long)getpid());
  struct gdn_caller caller;
  gdn_caller_enter(&caller);
  pthread_mutex_lock(&ctx->lock);
  ctx->caller = caller;
  return GDN_OK;
}

static gdn_status ctx_leave(gdn_ctx *ctx, gdn_status status) {
  const struct gdn_caller caller = ctx->caller;
  pthread_mutex_unlock(&ctx->lock);
  gdn_caller_leave(&caller);
  return status;
}

GDN_API gdn_status gdn_ctx_create(const gdn_ctx_args *args, gdn_ctx **ctx) {
  if (!ctx) return gdn_fail(GDN_E_NULL, "ctx is null");
  struct gdn_caller caller;
  gdn_caller_enter(&caller);
  gdn_status status = gdn_context_make(args, ctx);
  gdn_caller_leave(&caller);
  return status;
}

GDN_API void gdn_ctx_destroy(gdn_ctx *ctx) {
  struct gdn_caller caller;
  if (!ctx || ctx->pid != getpid()) return;
  gdn_caller_enter(&caller);
  gdn_context_free(ctx);
  gdn_caller_leave(&caller);
}

/* The bf16 tiers multiply by their own loops, ref by plain ones. */
static int uses_libxsmm(const gdn_ctx *ctx) {
  const int32_t isa = gdn_tiers[ctx->tier].isa;
  return isa == GDN_ISA_AVX2 || isa == GDN_ISA_AVX512;
}

GDN_API gdn_status gdn_ctx_info(gdn_ctx *ctx, gdn_info *info) {
  if (!info) return gdn_fail(GDN_E_NULL, "info is null");
  if (info->struct_size < sizeof *info || info->struct_size > 1u << 16)
    return gdn_fail(GDN_E_STRUCT_SIZE, "info.struct_size = %zu: expected at least %zu (sizeof the struct)",
                    info->struct_size, sizeof *info);
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  gdn_info known = {.struct_size = info->struct_size,
                    .cpu = ctx->cpu.name,
                    .isa = ctx->kernels.tier,
                    .tiers = ctx->tiers,
                    .n_tiers = gdn_n_tiers,
                    .n_threads = ctx->n_threads,
                    .n_cores = gdn_topo_n_cores(ctx->topo),
                    .pinned = ctx->pinned,
                    .placement = ctx->placement,
                    .product_provider = uses_libxsmm(ctx) ? gdn_gemm_provider() : "own",
                    .libxsmm_version = gdn_gemm_libxsmm_version()};
  known.scratch_bytes = ctx->shared.bytes;
  for (int i = 0; i < ctx->n_threads; i++) known.scratch_bytes += ctx->scratch[i].bytes;
  memcpy(info, &known, sizeof known);
  return ctx_leave(ctx, GDN_OK);
}

struct user_job {
  void (*fn)(void *arg, int32_t worker, int32_t n_workers);
  void *arg;
};

static void run_user(void *arg, int worker, int n_workers) {
  const struct user_job *job = arg;
  job->fn(job->arg, worker, n_workers);
}

GDN_API gdn_status gdn_ctx_run(gdn_ctx *ctx, void (*fn)(void *arg, int32_t worker, int32_t n_workers), void *arg) {
  struct user_job job = {fn, arg};
  if (!fn) return gdn_fail(GDN_E_NULL, "fn is null");
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  gdn_team_run(ctx->team, run_user, &job);
  return ctx_leave(ctx, GDN_OK);
}

/* ---- prefill, decode ---- */

GDN_API gdn_status gdn_prefill(gdn_ctx *ctx, const gdn_prefill_args *args) {
  struct gdn_batch batch;
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  status = gdn_check_prefill(args, NULL, &ctx->row_set, &batch);
  return ctx_leave(ctx, status ? status : gdn_run_prefill(ctx, &batch));
}

GDN_API gdn_status gdn_prefill_form(gdn_ctx *ctx, const gdn_prefill_args *args, int32_t *form) {
  struct gdn_batch batch;
  if (!form) return gdn_fail(GDN_E_NULL, "form is null");
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  status = gdn_check_prefill(args, NULL, &ctx->row_set, &batch);
  if (!status) *form = gdn_prefill_choose_form(ctx, &batch);
  return ctx_leave(ctx, status);
}

GDN_API gdn_status gdn_decode(gdn_ctx *ctx, const gdn_decode_args *args) {
  struct gdn_batch batch;
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  status = gdn_check_decode(args, NULL, &ctx->row_set, &batch);
  return ctx_leave(ctx, status ? status : gdn_run_decode(ctx, &batch));
}

GDN_API gdn_status gdn_gating(gdn_ctx *ctx, const gdn_gating_args *args) {
  struct gdn_gating gating;
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  status = gdn_check_gating(args, &gating);
  if (!status) gdn_run_gating(ctx, &gating);
  return ctx_leave(ctx, status);
}

/* ---- paged states ---- */

GDN_API gdn_status gdn_paged_slots_bytes(const gdn_page_table *table, size_t *bytes) {
  struct gdn_pages pages;
  if (!bytes) return gdn_fail(GDN_E_NULL, "bytes is null");
  gdn_status status = gdn_check_table_size(table, &pages);
  if (!status) *bytes = gdn_slots_bytes(pages.n_seqs, pages.n_indices);
  return status;
}

GDN_API gdn_status gdn_paged_slots(const gdn_page_table *table, void *memory, size_t memory_bytes, gdn_slots *slots) {
  struct gdn_pages pages;
  if (!slots) return gdn_fail(GDN_E_NULL, "slots is null");
  if (slots->struct_size < sizeof *slots || slots->struct_size > 1u << 16)
    return gdn_fail(GDN_E_STRUCT_SIZE, "slots.struct_size = %zu: expected at least %zu (sizeof the struct)",
                    slots->struct_size, sizeof *slots);
  gdn_status status = gdn_check_table(table, &pages);
  if (status) return status;
  if (!memory) return gdn_fail(GDN_E_NULL, "memory is null");
  size_t need_bytes = gdn_slots_bytes(pages.n_seqs, pages.n_indices);
  if (memory_bytes < need_bytes)
    return gdn_fail(GDN_E_SIZE, "memory_bytes = %zu: expected at least %zu", memory_bytes, need_bytes);
  status = gdn_check_slots_memory(&pages, memory, need_bytes);
  if (status) return status;
  size_t struct_size = slots->struct_size;
  gdn_slots made;
  status = gdn_make_slots(&pages, memory, &made);
  if (!status) memcpy(slots, &made, sizeof made);
  slots->struct_size = struct_size;
  return status;
}

GDN_API gdn_status gdn_prefill_paged(gdn_ctx *ctx, const gdn_prefill_args *args, const gdn_paged_args *paged) {
  struct gdn_batch batch;
  gdn_prefill_args unpaged;
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  status = gdn_unpage_prefill(args, paged, &ctx->slots_memory, &unpaged);
  if (!status) status = gdn_check_prefill(&unpaged, GDN_PAGED_POOL, &ctx->row_set, &batch);
  return ctx_leave(ctx, status ? status : gdn_run_prefill(ctx, &batch));
}

GDN_API gdn_status gdn_decode_paged(gdn_ctx *ctx, const gdn_decode_args *args, const gdn_paged_args *paged) {
  struct gdn_batch batch;
  gdn_decode_args unpaged;
  gdn_status status = ctx_enter(ctx);
  if (status) return status;
  status = gdn_unpage_decode(args, paged, &ctx->slots_memory, &unpaged);
  if (!status) status = gdn_check_decode(&unpaged, GDN_PAGED_POOL, &ctx->row_set, &batch);
  return ctx_leave(ctx, status ? status : gdn_run_decode(ctx, &batch));
}

/* ---- the table ---- */

GDN_API const gdn_interface *gdn_get_interface(uint32_t interface_version) {
  static const gdn_interface table = {.struct_size = sizeof table,
                                      .interface_version = GDN_INTERFACE_VERSION,
                                      .library_version = GDN_VERSION,
                                      .version = gdn_version,
                                      .version_string = gdn_version_string,
                                      .status_name = gdn_status_name,
                                      .last_error = gdn_last_error,
                                      .ctx_create = gdn_ctx_create,
                                      .ctx_destroy = gdn_ctx_destroy,
                                      .ctx_info = gdn_ctx_info,
                                      .ctx_run = gdn_ctx_run,
                                      .prefill = gdn_prefill,
                                      .prefill_form = gdn_prefill_form,
                                      .decode = gdn_decode,
                                      .paged_slots_bytes = gdn_paged_slots_bytes,
                                      .paged_slots = gdn_paged_slots,
                                      .prefill_paged = gdn_prefill_paged,
                                      .decode_paged = gdn_decode_paged,
                                      .gating = gdn_gating};
  if (interface_version == GDN_INTERFACE_VERSION) return &table;
  gdn_fail(GDN_E_OPTION, "interface_version = %u: this is libgdn %s, which has interface version %d only",
           (unsigned)interface_version, gdn_version_string(), GDN_INTERFACE_VERSION);
  return NULL;
}
