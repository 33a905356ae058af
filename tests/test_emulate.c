/* SPDX-License-Identifier: Apache-2.0
 * What emulate/ refuses: each misuse of tiles, alignment or streamed stores ends the process that does it. */
#include <immintrin.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char memory[8192] __attribute__((aligned(64)));

struct config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

/* Eight whole tiles, but for one. */
static void configure(int tile, int rows, int row_bytes) {
  struct config c = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    c.rows[i] = (uint8_t)(i == tile ? rows : 16);
    c.row_bytes[i] = (uint16_t)(i == tile ? row_bytes : 64);
  }
  _tile_loadconfig(&c);
}

static void *configure_only(void *unused) {
  (void)unused;
  configure(0, 16, 64);
  return NULL;
}

static void no_config(void) {
  _tile_zero(0);
}

static void rows_beyond(void) {
  configure(2, 17, 64);
}

static void bytes_beyond(void) {
  configure(2, 16, 68);
}

static void other_palette(void) {
  struct config c = {.palette = 2};
  _tile_loadconfig(&c);
}

static void no_such_tile(void) {
  configure(7, 0, 0);
  _tile_loadd(7, memory, 64);
}

static void shapes_do_not_fit(void) {
  configure(5, 16, 32);
  _tile_dpbf16ps(0, 5, 6);
}

static void sum_is_operand(void) {
  configure(0, 16, 64);
  _tile_dpbf16ps(0, 0, 6);
}

static void configured_twice(void) {
  configure(0, 16, 64);
  configure(0, 16, 64);
}

static void thread_keeps_tiles(void) {
  pthread_t t;
  if (pthread_create(&t, NULL, configure_only, NULL) == 0) pthread_join(t, NULL);
}

static void released_before_use(void) {
  configure(0, 16, 64);
  _tile_release();
  _tile_stored(0, memory, 64);
}

static void load_off_alignment(void) {
  _mm512_store_ps(memory, _mm512_load_ps(memory + 4));
}

static void stream_off_alignment(void) {
  _mm512_stream_si512((void *)(memory + 32), _mm512_setzero_si512());
}

static void stream_without_fence(void) {
  configure(0, 16, 64);
  _mm512_stream_si512((void *)memory, _mm512_setzero_si512());
  _tile_release();
}

static void right_use(void) {
  configure(0, 16, 64);
  _tile_zero(0);
  _tile_loadd(1, memory, 64);
  _tile_loadd(2, memory + 1024, 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, memory, 64);
  _mm512_stream_si512((void *)memory, _mm512_setzero_si512());
  _mm_sfence();
  _tile_release();
}

static int signal_of(void (*use)(void)) {
  int status = 0;
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    signal(SIGABRT, SIG_DFL);
    if (freopen("/dev/null", "w", stderr) == NULL) _exit(2);
    use();
    exit(0);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

static void emulation_ends_a_process_that_misuses_it(void **state) {
  (void)state;
  static void (*const uses[])(void) = {
      no_config,          rows_beyond,          bytes_beyond,        other_palette,      no_such_tile,
      shapes_do_not_fit,  sum_is_operand,       configured_twice,    thread_keeps_tiles, released_before_use,
      load_off_alignment, stream_off_alignment, stream_without_fence};
  for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
    if (signal_of(uses[i]) != SIGABRT) fail_msg("misuse %zu went through", i);
  }
  assert_int_equal(signal_of(right_use), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(emulation_ends_a_process_that_misuses_it)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
