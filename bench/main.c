/* SPDX-License-Identifier: Apache-2.0
 * gdn-bench: subcommands, their options and usage, and the context that they measure. */
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef GDN_GIT_COMMIT
#define GDN_GIT_COMMIT "unknown"
#endif

#define TARGET_VARIABLE "LIBXSMM_TARGET"

/* ---- options ---- */

enum option_kind { OPTION_FLAG, OPTION_COUNT, OPTION_SECONDS, OPTION_TEXT, OPTION_CHOICE };

struct choice {
  const char *name;
  int32_t value;
};

static const struct choice isa_choices[] = {{"ref", GDN_ISA_REF},       {"avx2", GDN_ISA_AVX2},
                                            {"avx512", GDN_ISA_AVX512}, {"avx512bf16", GDN_ISA_AVX512BF16},
                                            {"amx", GDN_ISA_AMX},       {NULL, 0}};
static const struct choice form_choices[] = {{"recurrent", GDN_FORM_RECURRENT}, {"chunk", GDN_FORM_CHUNK}, {NULL, 0}};

static const struct choice schedule_choices[] = {
    {"lanes", GDN_SCHEDULE_LANES}, {"windows", GDN_SCHEDULE_WINDOWS}, {NULL, 0}};
static const struct choice state_choices[] = {{"f32", GDN_F32}, {"bf16", GDN_BF16}, {"f16", GDN_F16}, {NULL, 0}};
static const struct choice layout_choices[] = {{"vk", GDN_LAYOUT_VK}, {"kv", GDN_LAYOUT_KV}, {NULL, 0}};

struct option {
  const char *name; /* without the dashes */
  enum option_kind kind;
  size_t offset; /* of the field in struct bench_options */
  int64_t max;   /* counts: 1 .. max */
  const struct choice *choices;
  const char *value_name;
  const char *help;
};

#define FIELD(name) offsetof(struct bench_options, name)

#define OPTIONS_COMMON                                                                                                 \
  {"isa",                                                                                                              \
   OPTION_CHOICE,                                                                                                      \
   FIELD(isa),                                                                                                         \
   0,                                                                                                                  \
   isa_choices,                                                                                                        \
   "TIER",                                                                                                             \
   "instruction set: ref, avx2, avx512, avx512bf16 or amx; default the highest available"},                            \
      {"threads", OPTION_COUNT, FIELD(threads), 4096, NULL, "N", "workers; default one per physical core"},            \
      {"cpus", OPTION_TEXT, FIELD(cpus), 0, NULL, "LIST", "cpus to use, as 0-3,8; default the affinity mask"}, {       \
    "json", OPTION_FLAG, FIELD(json), 0, NULL, NULL, "one JSON document instead of text"                               \
  }
#define OPTION_FORM                                                                                                    \
  { "form", OPTION_CHOICE, FIELD(form), 0, form_choices, "FORM", "recurrent or chunk; default the library's choice" }
#define OPTIONS_SHAPE                                                                                                  \
  {"heads", OPTION_COUNT, FIELD(heads), 4096, NULL, "H", "q and k heads; default 16"},                                 \
      {"v-heads", OPTION_COUNT, FIELD(v_heads), 4096, NULL, "HV", "value heads, a multiple of H; default 32"},         \
      OPTIONS_DIMS
#define OPTIONS_DIMS                                                                                                   \
  {"dim-k", OPTION_COUNT, FIELD(dim_k), 256, NULL, "K", "size of a q and k row, a multiple of 32; default 128"},       \
      {"dim-v", OPTION_COUNT, FIELD(dim_v), 256, NULL, "V", "size of a v row, a multiple of 32; default 128"}, {       \
    "seconds", OPTION_SECONDS, FIELD(seconds), 3600, NULL, "S", "time to spend on runs, at least 5; default 2"         \
  }
#define OPTIONS_END                                                                                                    \
  { NULL, OPTION_FLAG, 0, 0, NULL, NULL, NULL }

static const struct option run_options[] = {OPTIONS_COMMON, OPTION_FORM, OPTIONS_END};
static const struct option prefill_options[] = {
    {"lens", OPTION_TEXT, FIELD(lens), 0, NULL, "LENS", "sequences: 4096, or 512x8 for eight of 512, or 37,64,100"},
    OPTIONS_SHAPE,
    OPTION_FORM,
    {"schedule", OPTION_CHOICE, FIELD(schedule), 0, schedule_choices, "SCHEDULE",
     "lanes or windows, of the chunk form"},
    {"versus", OPTION_CHOICE, FIELD(versus), 0, isa_choices, "TIER", "also time this tier on the same threads"},
    {"baseline", OPTION_FLAG, FIELD(baseline), 0, NULL, NULL, "also time the other form and a plain C recurrence"},
    OPTIONS_COMMON,
    OPTIONS_END};
static const struct option decode_options[] = {
    {"batch", OPTION_COUNT, FIELD(batch), 1 << 24, NULL, "B", "sequences; default 64"},
    {"tokens", OPTION_COUNT, FIELD(tokens), GDN_DECODE_TOKENS_MAX, NULL, "T", "tokens of each sequence; default 1"},
    {"state", OPTION_CHOICE, FIELD(state), 0, state_choices, "DTYPE", "states as f32, bf16 or f16; default f32"},
    {"layout", OPTION_CHOICE, FIELD(layout), 0, layout_choices, "LAYOUT", "states as vk or kv; default vk"},
    {"raw-gates", OPTION_FLAG, FIELD(raw_gates), 0, NULL, NULL, "gates from a, b, A_log and dt_bias inside the call"},
    OPTIONS_SHAPE,
    OPTIONS_COMMON,
    OPTIONS_END};
static const struct option paged_options[] = {
    {"requests", OPTION_COUNT, FIELD(requests), 1 << 20, NULL, "B", "requests that share a prefix; default 8"},
    {"prefix", OPTION_COUNT, FIELD(prefix), 1 << 24, NULL, "P", "tokens of the shared prefix; default 2048"},
    {"suffix", OPTION_COUNT, FIELD(suffix), 1 << 24, NULL, "S", "tokens of each request's own; default 128"},
    {"steps", OPTION_COUNT, FIELD(steps), 1 << 20, NULL, "N", "decode steps after them; default 16"},
    {"page-size", OPTION_COUNT, FIELD(page_size), 1 << 24, NULL, "N", "tokens of a page, 64 n; default 256"},
    {"layers", OPTION_COUNT, FIELD(layers), 4096, NULL, "N", "layers that use a step's slots; default 48"},
    OPTIONS_SHAPE,
    OPTION_FORM,
    OPTIONS_COMMON,
    OPTIONS_END};
static const struct option latency_options[] = {
    {"seconds", OPTION_SECONDS, FIELD(seconds), 3600, NULL, "S", "time to spend on runs; default 2"},
    OPTIONS_COMMON,
    OPTIONS_END};
static const struct option products_options[] = {OPTIONS_DIMS, OPTIONS_COMMON, OPTIONS_END};
static const struct option steps_options[] = {
    {"lens", OPTION_TEXT, FIELD(lens), 0, NULL, "LENS", "sequences: 4096, or 512x8 for eight of 512, or 37,64,100"},
    OPTIONS_SHAPE,
    OPTIONS_COMMON,
    OPTIONS_END};
static const struct option halves_options[] = {
    {"first", OPTION_TEXT, FIELD(first), 0, NULL, "LIST", "cpus of one context; default half the cores"},
    {"second", OPTION_TEXT, FIELD(second), 0, NULL, "LIST", "cpus of the other; default the other half"},
    {"lens", OPTION_TEXT, FIELD(lens), 0, NULL, "LENS", "sequences of prefill: 4096, or 512x8, or 37,64,100"},
    {"batch", OPTION_COUNT, FIELD(batch), 1 << 24, NULL, "B", "sequences of decode; default 64"},
    OPTIONS_SHAPE,
    OPTION_FORM,
    {"schedule", OPTION_CHOICE, FIELD(schedule), 0, schedule_choices, "SCHEDULE",
     "lanes or windows, of the chunk form"},
    OPTIONS_COMMON,
    OPTIONS_END};
static const struct option info_options[] = {OPTIONS_COMMON, OPTIONS_END};

struct command {
  const char *name;
  const char *operands; /* null: takes none */
  const struct option *options;
  int (*run)(const struct bench_options *o);
  const char *help;
  const char *details;
};

static const struct command commands[] = {
    {"run", "DIR...", run_options, bench_run, "check cases in the golden format: prefill and token-by-token decode",
     "Each DIR holds one case as .npy files: q, k, v, g, beta, cu_seqlens, out, final_state, and initial_state where\n"
     "the sequences do not start from zero. Errors are relative L2 against out and final_state. Exit status 1 if a\n"
     "case exceeds its bound, 2 for a malformed case."},
    {"prefill", NULL, prefill_options, bench_prefill, "time chunked prefill against the machine's limit",
     "efficiency is limit / median, both taken interleaved. The limit is the time that the recurrent form's "
     "operations,\n"
     "8 K V per token and value head, take at the rate of libxsmm's f32 64 x 128 x 128 product on the same threads; "
     "for\n"
     "the chunk form on AMX it is the time of the call's own tile products, back to back, operands in cache."},
    {"decode", NULL, decode_options, bench_decode, "time one decode step against memory bandwidth",
     "efficiency is the time of a plain read-modify-write sweep over the same states on the same threads, over the\n"
     "time of the call. Rates count every byte of state twice: read and written. Of several tokens the call is a\n"
     "verify, which writes no state; one_token and commit are then timed with it."},
    {"paged", NULL, paged_options, bench_paged, "time requests that share a prefix, on a paged pool of states",
     "speedup is the prefill that recomputes the prefix over the one that starts from its full pages. Both are one\n"
     "layer's, with ready slots. Then both sides decode, and all outputs and pages are compared: exit status 1 if a\n"
     "bit differs. slots_us is the time to make the rows of the prefill, once for all layers."},
    {"latency", NULL, latency_options, bench_latency, "time calls without work: checks, hand-over, waking the workers",
     "Figures are of one call, taken in rows of 100, but for those with workers asleep, where each call comes 1 ms\n"
     "after the last. Without --threads, for one worker and for all."},
    {"products", NULL, products_options, bench_products, "time tile products against those of libxsmm",
     "Of the tier amx, on one worker. A panel is 32 columns of V, as the chunk form multiplies them; libxsmm takes "
     "them\n"
     "from 2.0 on."},
    {"steps", NULL, steps_options, bench_steps, "time every primitive of the chunk form",
     "One worker takes a batch through the chunk form as lanes do, from zero states, without storing them. Times are\n"
     "of one call of a primitive: qk of a chunk of a q/k head, the others of a chunk of a value head. Cycles are the\n"
     "core's, told by a chain of dependent multiplications before each round."},
    {"halves", NULL, halves_options, bench_halves, "time two contexts side by side against each alone",
     "ratio is the throughput of both contexts at once over the sum of each alone: rounds of first alone, second "
     "alone,\n"
     "both, each 20 ms or a call long, and of the rounds' ratios the median. Each context has a calling thread of its\n"
     "own, which may run anywhere. Controls say what the machine gives: the same workers without calls between, each\n"
     "on products of its own (tiles or f32) or sweeping its part of the states; of_control is a call's ratio over its\n"
     "control's. --threads and --cpus are of both contexts together."},
    {"info", NULL, info_options, bench_info, "tell processor, tiers, chosen tier, threads and versions", NULL},
};

#define N_COMMANDS ((int)(sizeof commands / sizeof commands[0]))

int bench_error(const char *format, ...) {
  va_list args;
  fputs("gdn-bench: ", stderr);
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
  return BENCH_UNABLE;
}

int bench_check(gdn_status status, const char *call) {
  return status == GDN_OK ? BENCH_OK : bench_error("%s: %s: %s", call, gdn_status_name(status), gdn_last_error());
}

static void print_usage(FILE *f) {
  fprintf(f, "usage: gdn-bench COMMAND [OPTION...]\n\ncommands:\n");
  for (int i = 0; i < N_COMMANDS; i++) {
    fprintf(f, "  %-8s  %s\n", commands[i].name, commands[i].help);
  }
  fprintf(f, "\n  --help     this text; gdn-bench COMMAND --help tells a command's options\n"
             "  --version  version of the library\n");
}

static void print_command_usage(const struct command *c) {
  printf("usage: gdn-bench %s [OPTION...]%s%s\n\n%s\n\noptions:\n", c->name, c->operands ? " " : "",
         c->operands ? c->operands : "", c->help);
  for (const struct option *o = c->options; o->name; o++) {
    char left[40];
    snprintf(left, sizeof left, "--%s %s", o->name, o->value_name ? o->value_name : "");
    printf("  %-16s  %s\n", left, o->help);
  }
  printf("  %-16s  %s\n", "--help", "this text");
  if (c->details) {
    printf("\n%s\n", c->details);
  }
}

static int store_count(const struct option *option, const char *value, int64_t *field) {
  char *end = NULL;
  errno = 0;
  long long n = strtoll(value, &end, 10);
  if (end == value || *end || errno || n < 1 || n > option->max) {
    return bench_error("--%s %s: expected a whole number from 1 to %lld", option->name, value, (long long)option->max);
  }
  *field = n;
  return BENCH_OK;
}

static int store_seconds(const struct option *option, const char *value, double *field) {
  char *end = NULL;
  double seconds = strtod(value, &end);
  if (end == value || *end || !isfinite(seconds) || seconds < 0 || seconds > (double)option->max) {
    return bench_error("--%s %s: expected seconds from 0 to %lld", option->name, value, (long long)option->max);
  }
  *field = seconds;
  return BENCH_OK;
}

static int store_choice(const struct option *option, const char *value, int32_t *field) {
  const struct choice *c = option->choices;
  while (c->name && strcmp(c->name, value) != 0) {
    c++;
  }
  if (!c->name) {
    char names[64] = "";
    for (const struct choice *known = option->choices; known->name; known++) {
      size_t used = strlen(names);
      snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", known->name);
    }
    return bench_error("--%s %s: expected one of %s", option->name, value, names);
  }
  *field = c->value;
  return BENCH_OK;
}

static int store_option(const struct option *option, const char *value, struct bench_options *o) {
  void *field = (char *)o + option->offset;
  switch (option->kind) {
  case OPTION_FLAG:
    *(bool *)field = true;
    return BENCH_OK;
  case OPTION_COUNT:
    return store_count(option, value, field);
  case OPTION_SECONDS:
    return store_seconds(option, value, field);
  case OPTION_CHOICE:
    return store_choice(option, value, field);
  default:
    *(const char **)field = value;
    return BENCH_OK;
  }
}

/* Takes "--name", "--name value" or "--name=value" at args[0]; *n_taken tells how many of args it was. */
static int take_option(const struct command *c, char **args, struct bench_options *o, int *n_taken) {
  const char *name = args[0] + 2;
  const char *equals = strchr(name, '=');
  size_t n = equals ? (size_t)(equals - name) : strlen(name);
  const struct option *option = c->options;
  while (option->name && (strlen(option->name) != n || memcmp(option->name, name, n) != 0)) {
    option++;
  }
  if (!option->name) {
    return bench_error("unknown option %s; see gdn-bench %s --help", args[0], c->name);
  }
  if (option->kind == OPTION_FLAG && equals) {
    return bench_error("--%s takes no value", option->name);
  }
  const char *value = equals ? equals + 1 : option->kind == OPTION_FLAG ? NULL : args[1];
  if (option->kind != OPTION_FLAG && !value) {
    return bench_error("--%s needs a value", option->name);
  }
  *n_taken = option->kind == OPTION_FLAG || equals ? 1 : 2;
  return store_option(option, value, o);
}

/* args is null-terminated and stays as it is; dirs holds as many. *help is set for --help. */
static int parse_options(const struct command *c, char **args, struct bench_options *o, bool *help) {
  bool only_operands = false;
  while (*args) {
    int n_taken = 1;
    if (!only_operands && strcmp(*args, "--") == 0) {
      only_operands = true;
    } else if (!only_operands && (strcmp(*args, "--help") == 0 || strcmp(*args, "-h") == 0)) {
      *help = true;
      return BENCH_OK;
    } else if (!only_operands && strncmp(*args, "--", 2) == 0) {
      int status = take_option(c, args, o, &n_taken);
      if (status != BENCH_OK) {
        return status;
      }
    } else if (!only_operands && (*args)[0] == '-') {
      return bench_error("unknown option %s; see gdn-bench %s --help", *args, c->name);
    } else if (!c->operands) {
      return bench_error("unexpected argument \"%s\"; see gdn-bench %s --help", *args, c->name);
    } else {
      o->dirs[o->n_dirs++] = *args;
    }
    args += n_taken;
  }
  if (c->operands && o->n_dirs == 0) {
    return bench_error("%s needs %s; see gdn-bench %s --help", c->name, c->operands, c->name);
  }
  return BENCH_OK;
}

/* ---- context ---- */

int bench_open(const struct bench_options *o, struct bench_session *s) {
  gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = (int32_t)o->threads, .isa = o->isa};
  if (o->cpus) {
    args.place = GDN_PLACE_CPU_LIST;
    args.cpu_list = o->cpus;
  }
  memset(s, 0, sizeof *s);
  int status = bench_check(gdn_ctx_create(&args, &s->ctx), "gdn_ctx_create");
  if (status != BENCH_OK) {
    return status;
  }
  s->info.struct_size = sizeof s->info;
  status = bench_check(gdn_ctx_info(s->ctx, &s->info), "gdn_ctx_info");
  for (const struct choice *c = isa_choices; c->name && status == BENCH_OK; c++) {
    if (c->value != o->isa || strcmp(c->name, s->info.isa) == 0) {
      continue;
    }
    const char *reason = "unknown to this library";
    for (int i = 0; i < s->info.n_tiers; i++) {
      reason = strcmp(s->info.tiers[i].name, c->name) == 0 ? s->info.tiers[i].reason : reason;
    }
    status = bench_error("--isa %s: not available (%s); the highest tier here is %s", c->name, reason, s->info.isa);
  }
  if (status != BENCH_OK) {
    bench_close(s);
  }
  return status;
}

void bench_close(struct bench_session *s) {
  gdn_ctx_destroy(s->ctx);
  s->ctx = NULL;
}

uint64_t bench_scratch_bytes(const struct bench_session *s) {
  gdn_info now = {.struct_size = sizeof now};
  return gdn_ctx_info(s->ctx, &now) == GDN_OK ? now.scratch_bytes : 0;
}

const char *bench_form_name(int32_t form) {
  return form == GDN_FORM_CHUNK ? "chunk" : "recurrent";
}

const char *bench_product_target(void) {
  const char *target = getenv(TARGET_VARIABLE);
  return target && *target ? target : "native";
}

static void today(char *text, size_t text_bytes) {
  time_t now = time(NULL);
  struct tm utc;
  if (!gmtime_r(&now, &utc) || strftime(text, text_bytes, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0) {
    snprintf(text, text_bytes, "unknown");
  }
}

#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

void bench_conditions_json(struct json *j, const struct bench_session *s) {
  char date[32];
  today(date, sizeof date);
  json_begin_object(j, "conditions");
  json_string(j, "cpu", s->info.cpu);
  json_int(j, "cores", s->info.n_cores);
  json_bool(j, "pinned", s->info.pinned == 1);
  json_string(j, "placement", s->info.placement);
  json_string(j, "compiler", COMPILER);
  json_string(j, "library_version", gdn_version_string());
  json_string(j, "git_commit", GDN_GIT_COMMIT);
  json_string(j, "libxsmm_version", s->info.libxsmm_version);
  json_string(j, "libxsmm_target", bench_product_target());
  json_string(j, "date", date);
  json_end_object(j);
}

void bench_conditions_print(const struct bench_session *s) {
  printf("gdn %s (%s), tier %s, %d thread%s on %d core%s (%s)\n%s, " COMPILER "\n", gdn_version_string(),
         GDN_GIT_COMMIT, s->info.isa, s->info.n_threads, s->info.n_threads == 1 ? "" : "s", s->info.n_cores,
         s->info.n_cores == 1 ? "" : "s", s->info.placement, s->info.cpu);
}

/* ---- start ---- */

/* A capped tier is compared with products capped alike. libxsmm reads the variable when it is first used, or already
 * when it is loaded as a shared library; hence a fresh start of the program. A value that the user set stays. */
static void cap_products(const struct bench_options *o, char **argv) {
  static const char *const targets[] = {[GDN_ISA_REF] = "wsm", [GDN_ISA_AVX2] = "hsw", [GDN_ISA_AVX512] = "skx"};
  const char *from_environment = getenv("GDN_ISA");
  int32_t isa = o->isa;
  for (const struct choice *c = isa_choices; c->name && from_environment; c++) {
    if (strcmp(c->name, from_environment) == 0 && (isa == GDN_ISA_DEFAULT || c->value < isa)) {
      isa = c->value;
    }
  }
  if (isa == GDN_ISA_DEFAULT || isa > GDN_ISA_AVX512 || getenv(TARGET_VARIABLE)) {
    return;
  }
  if (setenv(TARGET_VARIABLE, targets[isa], 1) == 0) {
    execv("/proc/self/exe", argv);
  }
}

static const struct command *find_command(const char *name) {
  for (int i = 0; i < N_COMMANDS; i++) {
    if (strcmp(commands[i].name, name) == 0) {
      return &commands[i];
    }
  }
  return NULL;
}

static int run_command(const struct command *c, int argc, char **argv) {
  struct bench_options o = {.seconds = 2,
                            .lens = "4096",
                            .batch = 64,
                            .tokens = 1,
                            .state = GDN_F32,
                            .layout = GDN_LAYOUT_VK,
                            .heads = 16,
                            .v_heads = 32,
                            .dim_k = 128,
                            .dim_v = 128,
                            .requests = 8,
                            .prefix = 2048,
                            .suffix = 128,
                            .steps = 16,
                            .page_size = 256,
                            .layers = 48};
  o.dirs = calloc((size_t)argc, sizeof *o.dirs);
  if (!o.dirs) {
    return bench_error("out of memory for %d arguments", argc);
  }
  bool help = false;
  int status = parse_options(c, argv + 2, &o, &help);
  if (status == BENCH_OK && help) {
    print_command_usage(c);
  } else if (status == BENCH_OK) {
    cap_products(&o, argv);
    status = c->run(&o);
  }
  free(o.dirs);
  return status;
}

int main(int argc, char **argv) {
  int status = BENCH_OK;
  const struct command *c = argc > 1 ? find_command(argv[1]) : NULL;
  if (c) {
    status = run_command(c, argc, argv);
  } else if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
    print_usage(stdout);
  } else if (argc > 1 && strcmp(argv[1], "--version") == 0) {
    printf("gdn-bench %s\n", gdn_version_string());
  } else if (argc > 1) {
    status = bench_error("unknown command \"%s\"; see gdn-bench --help", argv[1]);
  } else {
    print_usage(stderr);
    status = BENCH_UNABLE;
  }
  if (fflush(stdout) != 0 || ferror(stdout)) {
    status = bench_error("cannot write the output: %s", strerror(errno));
  }
  return status;
}
