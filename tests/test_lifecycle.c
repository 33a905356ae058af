/* SPDX-License-Identifier: Apache-2.0
 * The shared library as a host loads it, uses it and is rid of it again. Not linked: GDN_LIBRARY is its path. */
#define _GNU_SOURCE 1
#include "guest.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static struct guest_work work;

/* ---- loading ---- */

/* ThreadSanitizer runs what a library registers with atexit after the library is gone, so with it none ever goes. */
static void *load(const char *path, int flags) {
  void *library = dlopen(path, RTLD_NOW | flags | (SANITIZED ? RTLD_NODELETE : 0));
  if (!library) fail_msg("%s", dlerror());
  return library;
}

static const gdn_interface *interface_of(void *library) {
  const gdn_interface *(*get)(uint32_t);
  void *symbol = dlsym(library, "gdn_get_interface");
  assert_non_null(symbol);
  memcpy(&get, &symbol, sizeof get);
  const gdn_interface *gdn = get(GDN_INTERFACE_VERSION);
  assert_non_null(gdn);
  return gdn;
}

static gdn_ctx *make_ctx(const gdn_interface *gdn, int n_threads) {
  const gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = n_threads};
  gdn_ctx *ctx = NULL;
  if (gdn->ctx_create(&args, &ctx) != GDN_OK) fail_msg("%s", gdn->last_error());
  return ctx;
}

static void nap_ms(long ms) {
  const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

/* Runs every kind of call; 0 if all came through, with the same bits as ever. */
static int run_all(const gdn_interface *gdn, gdn_ctx *ctx, struct guest_work *own) {
  static _Atomic uint64_t digests[GUEST_N_CALLS];
  for (int call = 0; call < GUEST_N_CALLS; call++) {
    if (guest_run(gdn, ctx, own, (enum guest_call)call) != GDN_OK) return 1;
    uint64_t first = 0;
    const uint64_t digest = guest_digest(own);
    if (!atomic_compare_exchange_strong(&digests[call], &first, digest) && first != digest) return 2;
  }
  return 0;
}

static void whole_life(int n_threads) {
  void *library = load(GDN_LIBRARY, RTLD_LOCAL);
  const gdn_interface *gdn = interface_of(library);
  gdn_ctx *ctx = make_ctx(gdn, n_threads);
  assert_int_equal(run_all(gdn, ctx, &work), 0);
  gdn->ctx_destroy(ctx);
  assert_int_equal(dlclose(library), 0);
}

static int is_loaded(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (!library) {
    dlerror();
    return 0;
  }
  dlclose(library);
  return 1;
}

/* ---- what the file asks of the loader ---- */

static void library_needs_no_static_tls_and_has_no_constructors(void **state) {
  (void)state;
  void *library = load(GDN_LIBRARY, RTLD_LOCAL);
  struct link_map *map = NULL;
  assert_int_equal(dlinfo(library, RTLD_DI_LINKMAP, &map), 0);
  size_t init_bytes = 0, fini_bytes = 0;
  for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
    if (entry->d_tag == DT_FLAGS) assert_int_equal(entry->d_un.d_val & DF_STATIC_TLS, 0);
    if (entry->d_tag == DT_INIT_ARRAYSZ) init_bytes = entry->d_un.d_val;
    if (entry->d_tag == DT_FINI_ARRAYSZ) fini_bytes = entry->d_un.d_val;
  }
  /* The compiler's own pair, which registers the object's frames. */
  if (!SANITIZED) assert_in_range(init_bytes, 0, sizeof(void *));
  if (!SANITIZED) assert_in_range(fini_bytes, 0, sizeof(void *));
  dlclose(library);
}

static void unknown_interface_version_gives_null_and_a_text(void **state) {
  (void)state;
  void *library = load(GDN_LIBRARY, RTLD_LOCAL);
  const gdn_interface *gdn = interface_of(library), *(*get)(uint32_t);
  void *symbol = dlsym(library, "gdn_get_interface");
  memcpy(&get, &symbol, sizeof get);
  assert_null(get(0));
  assert_null(get(GDN_INTERFACE_VERSION + 1));
  assert_non_null(strstr(gdn->last_error(), "interface_version = 2"));
  assert_ptr_equal(get(GDN_INTERFACE_VERSION), gdn);
  assert_in_range(gdn->struct_size, sizeof *gdn, 1 << 16);
  assert_int_equal(gdn->interface_version, GDN_INTERFACE_VERSION);
  assert_int_equal(gdn->library_version, GDN_VERSION);
  assert_int_equal(gdn->version(), GDN_VERSION);
  /* Pointers follow the fixed fields without a gap; none may be missing. */
  const char *const first = (const char *)&gdn->version;
  for (const char *at = first; at < (const char *)gdn + gdn->struct_size; at += sizeof(void *)) {
    void *function;
    memcpy(&function, at, sizeof function);
    assert_non_null(function);
  }
  dlclose(library);
}

/* ---- over and over ---- */

/* Memory settles in the first rounds: the runtime's own, the allocator's arenas. */
static void load_use_unload_200_times_leaves_nothing(void **state) {
  (void)state;
  enum { N_ROUNDS = 200, N_FIRST = 50 };
  int n_threads = 0, n_files = 0;
  int64_t bytes = 0;
  for (int round = 0; round < N_ROUNDS; round++) {
    whole_life(round < 2 ? 4 : 1 + round % 4);
    if (round == N_FIRST) {
      n_threads = guest_n_threads();
      n_files = guest_n_files();
      bytes = guest_resident_bytes();
    }
  }
  print_message("after round %d: %d threads, %d descriptors, %lld KiB; after %d: %d, %d, %lld\n", N_FIRST, n_threads,
                n_files, (long long)bytes / 1024, N_ROUNDS, guest_n_threads(), guest_n_files(),
                (long long)guest_resident_bytes() / 1024);
  assert_int_equal(guest_n_threads(), n_threads);
  assert_int_equal(guest_n_files(), n_files);
  if (!SANITIZED) { /* address sanitizer keeps what is freed for a while */
    assert_in_range(guest_resident_bytes(), 0, bytes + (1 << 20));
    assert_int_equal(is_loaded(GDN_LIBRARY), 0);
  }
}

struct life {
  void *library;
  atomic_int destroyed, unloaded;
};

static void *create_and_outlive(void *arg) {
  struct life *life = arg;
  const gdn_interface *gdn = interface_of(life->library);
  gdn_ctx *ctx = make_ctx(gdn, 2);
  int failed = run_all(gdn, ctx, &work);
  failed +=
      gdn->decode(ctx, NULL) != GDN_E_NULL; /* this thread now has an error text in the library's thread storage */
  gdn->ctx_destroy(ctx);
  atomic_store(&life->destroyed, 1);
  while (!atomic_load(&life->unloaded)) nap_ms(1);
  nap_ms(20);
  return failed ? life : NULL;
}

static void unloading_under_a_living_creator_is_harmless(void **state) {
  (void)state;
  for (int round = 0; round < 10; round++) {
    struct life life = {.library = load(GDN_LIBRARY, RTLD_LOCAL)};
    pthread_t thread;
    void *failed;
    assert_int_equal(pthread_create(&thread, NULL, create_and_outlive, &life), 0);
    while (!atomic_load(&life.destroyed)) nap_ms(1);
    assert_int_equal(dlclose(life.library), 0);
    if (!SANITIZED) assert_int_equal(is_loaded(GDN_LIBRARY), 0);
    atomic_store(&life.unloaded, 1);
    pthread_join(thread, &failed);
    assert_null(failed);
  }
}

/* ---- two copies ---- */

static void copy_file(const char *from, const char *to) {
  static char buffer[1 << 16];
  const int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0700);
  assert_true(in >= 0 && out >= 0);
  for (ssize_t n; (n = read(in, buffer, sizeof buffer)) > 0;) assert_int_equal(write(out, buffer, (size_t)n), n);
  close(in);
  close(out);
}

static void *object_of(const void *address) {
  Dl_info info;
  assert_true(dladdr(address, &info) != 0);
  return info.dli_fbase;
}

/* The first copy's names are global, as if the host were linked with it; the second must not fall for them. */
static void two_copies_do_not_mix(void **state) {
  (void)state;
  char path[] = "/tmp/gdn_copy_XXXXXX";
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  copy_file(GDN_LIBRARY, path);
  void *first = load(GDN_LIBRARY, RTLD_GLOBAL), *second = load(path, RTLD_LOCAL);
  unlink(path);
  const gdn_interface *a = interface_of(first), *b = interface_of(second);
  assert_ptr_not_equal(a, b);
  void *symbol;
  memcpy(&symbol, &b->prefill, sizeof symbol);
  assert_ptr_equal(object_of(symbol), object_of(b));
  gdn_ctx *ctx_a = make_ctx(a, 2), *ctx_b = make_ctx(b, 3);
  for (int round = 0; round < 10; round++) {
    assert_int_equal(run_all(a, ctx_a, &work), 0);
    assert_int_equal(run_all(b, ctx_b, &work), 0);
  }
  assert_int_equal(a->decode(ctx_a, NULL), GDN_E_NULL);
  assert_string_equal(b->last_error(), ""); /* each has its own text */
  a->ctx_destroy(ctx_a);
  dlclose(first);
  assert_int_equal(run_all(b, ctx_b, &work), 0);
  b->ctx_destroy(ctx_b);
  dlclose(second);
}

/* ---- fork, exit ---- */

static int exit_code(pid_t child) {
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static int child_after_fork(const gdn_interface *gdn, gdn_ctx *inherited) {
  gdn_info info = {.struct_size = sizeof info};
  alarm(20); /* whoever waits for workers that are not there hangs */
  if (guest_run(gdn, inherited, &work, GUEST_DECODE) != GDN_E_FORK) return 2;
  if (!strstr(gdn->last_error(), "child")) return 3;
  if (gdn->ctx_info(inherited, &info) != GDN_E_FORK) return 4;
  gdn->ctx_destroy(inherited);
  if (SANITIZED) return 0; /* ThreadSanitizer refuses threads after a fork with threads */
  for (int round = 0; round < 3; round++) {
    gdn_ctx *own = NULL;
    const gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = 1 + round};
    if (gdn->ctx_create(&args, &own) != GDN_OK) return 5;
    if (run_all(gdn, own, &work)) return 6;
    gdn->ctx_destroy(own);
  }
  return 0;
}

static void forked_child_is_refused_and_makes_its_own(void **state) {
  (void)state;
  void *library = load(GDN_LIBRARY, RTLD_LOCAL);
  const gdn_interface *gdn = interface_of(library);
  gdn_ctx *ctx = make_ctx(gdn, 3);
  assert_int_equal(run_all(gdn, ctx, &work), 0);
  for (int i = 0; i < 5; i++) {
    const pid_t child = fork();
    if (child == 0) _exit(child_after_fork(gdn, ctx));
    assert_int_equal(exit_code(child), 0);
    assert_int_equal(run_all(gdn, ctx, &work), 0);
  }
  gdn->ctx_destroy(ctx);
  dlclose(library);
}

struct busy {
  const gdn_interface *gdn;
  gdn_ctx *ctx;
  atomic_int n_calls;
};

static void *stay_busy(void *arg) {
  struct busy *busy = arg;
  static struct guest_work own;
  guest_fill(&own);
  while (busy->gdn) {
    for (int call = 0; call < GUEST_N_CALLS; call++) guest_run(busy->gdn, busy->ctx, &own, (enum guest_call)call);
    atomic_fetch_add(&busy->n_calls, 1);
  }
  return NULL;
}

/* exit() with one context asleep, one just used, and one in the middle of a call of another thread. */
static int main_exits_with_live_contexts(int busy_too) {
  static struct busy busy;
  void *library = dlopen(GDN_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (!library) return 2;
  const gdn_interface *gdn = interface_of(library);
  static gdn_ctx *volatile live[2]; /* so that leak checkers find them */
  live[0] = make_ctx(gdn, 2);
  busy.gdn = gdn;
  busy.ctx = make_ctx(gdn, 2);
  live[1] = make_ctx(gdn, 3);
  if (run_all(gdn, live[1], &work)) return 3;
  pthread_t thread;
  if (busy_too) {
    if (pthread_create(&thread, NULL, stay_busy, &busy)) return 4;
    while (atomic_load(&busy.n_calls) < 3) nap_ms(1);
  }
  return 0;
}

static void exit_with_live_contexts_is_clean(void **state) {
  (void)state;
  for (int i = 0; i < 10; i++) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
      execl("/proc/self/exe", "test_lifecycle", i % 2 && !SANITIZED ? "exit-busy" : "exit", (char *)NULL);
      _exit(99);
    }
    assert_int_equal(exit_code(child), 0);
  }
}

int main(int argc, char **argv) {
  if (access("/proc/self/exe", X_OK) != 0) return 77; /* nothing to look at, nothing to run */
  guest_fill(&work);
  if (argc > 1) return main_exits_with_live_contexts(!strcmp(argv[1], "exit-busy"));
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(library_needs_no_static_tls_and_has_no_constructors),
      cmocka_unit_test(unknown_interface_version_gives_null_and_a_text),
      cmocka_unit_test(load_use_unload_200_times_leaves_nothing),
      cmocka_unit_test(unloading_under_a_living_creator_is_harmless),
      cmocka_unit_test(two_copies_do_not_mix),
      cmocka_unit_test(forked_child_is_refused_and_makes_its_own),
      cmocka_unit_test(exit_with_live_contexts_is_clean),
  };
  return cmocka_run_group_tests_name("lifecycle", tests, NULL, NULL);
}
