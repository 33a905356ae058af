/* SPDX-License-Identifier: Apache-2.0
 * What emulated instructions leave behind in a thread: tiles, and output that waits for a fence. A thread that ends
 * with either of them left over aborts, and so does the program at its end. */
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define N_TILES 8
#define ROWS_MAX 16
#define ROW_BYTES 64

static _Thread_local struct {
  int configured, streamed, watched;
  struct {
    int rows, row_bytes; /* 0 rows: not configured */
    unsigned char data[ROWS_MAX][ROW_BYTES];
  } tiles[N_TILES];
} state;

void emu_fail(const char *operation, const char *what) {
  fprintf(stderr, "emulated: %s: %s\n", operation, what);
  abort();
}

/* ---- what a thread may not leave behind ---- */

static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

static void check_left(void *unused) {
  (void)unused;
  if (state.configured) emu_fail("end of a thread", "its tiles were not released");
  if (state.streamed) emu_fail("end of a thread", "streamed output was not fenced");
}

static void make_key(void) {
  if (pthread_key_create(&key, check_left)) emu_fail("start", "no key for threads");
}

static void watch_thread(void) {
  if (state.watched) return;
  state.watched = 1;
  pthread_once(&key_once, make_key);
  pthread_setspecific(key, &state);
}

__attribute__((destructor)) static void check_main_thread(void) {
  check_left(NULL);
}

void emu_streamed(void) {
  watch_thread();
  state.streamed = 1;
}

void emu_fence(void) {
  state.streamed = 0;
}

/* ---- tiles ---- */

struct tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

void emu_tile_loadconfig(const void *memory) {
  const char *name = "_tile_loadconfig";
  struct tile_config c;
  memcpy(&c, memory, sizeof c);
  watch_thread();
  if (state.configured) emu_fail(name, "the tiles of the last job were not released");
  if (c.palette != 1) emu_fail(name, "the palette is not 1");
  if (c.start_row) emu_fail(name, "start_row is not 0");
  for (int i = 0; i < 14; i++)
    if (c.reserved[i]) emu_fail(name, "a reserved byte is not 0");
  for (int i = 0; i < 16; i++) {
    if (c.rows[i] > ROWS_MAX || c.row_bytes[i] > ROW_BYTES) emu_fail(name, "a tile of more than 16 rows of 64 bytes");
    if (!c.rows[i] != !c.row_bytes[i]) emu_fail(name, "a tile with rows of no bytes or no rows");
    if (i >= N_TILES && c.rows[i]) emu_fail(name, "a ninth tile");
  }
  memset(state.tiles, 0, sizeof state.tiles);
  for (int i = 0; i < N_TILES; i++) {
    state.tiles[i].rows = c.rows[i];
    state.tiles[i].row_bytes = c.row_bytes[i];
  }
  state.configured = 1;
}

/* Streamed output is owed its fence even where the thread goes on. */
void emu_tile_release(void) {
  if (state.streamed) emu_fail("_tile_release", "streamed output was not fenced");
  state.configured = 0;
}

static void need_tile(const char *name, int tile) {
  if (!state.configured) emu_fail(name, "before _tile_loadconfig");
  if (tile < 0 || tile >= N_TILES || !state.tiles[tile].rows) emu_fail(name, "a tile that is not configured");
}

void emu_tile_zero(int tile) {
  need_tile("_tile_zero", tile);
  memset(state.tiles[tile].data, 0, sizeof state.tiles[tile].data);
}

void emu_tile_load(int tile, const void *base, int64_t stride) {
  need_tile("_tile_loadd", tile);
  memset(state.tiles[tile].data, 0, sizeof state.tiles[tile].data);
  for (int i = 0; i < state.tiles[tile].rows; i++)
    memcpy(state.tiles[tile].data[i], (const char *)base + i * stride, (size_t)state.tiles[tile].row_bytes);
}

void emu_tile_store(int tile, void *base, int64_t stride) {
  need_tile("_tile_stored", tile);
  for (int i = 0; i < state.tiles[tile].rows; i++)
    memcpy((char *)base + i * stride, state.tiles[tile].data[i], (size_t)state.tiles[tile].row_bytes);
}

/* A row of sums: products of even and of odd elements are added up apart, in the order of k, then both to the sum. */
static void sum_row(float *sum, const unsigned char *a, const __m512 even[ROWS_MAX], const __m512 odd[ROWS_MAX],
                    int n_pairs) {
  __m512 sum_even = {0}, sum_odd = {0};
  for (int k = 0; k < n_pairs; k++) {
    uint32_t pair;
    memcpy(&pair, a + 4 * k, 4);
    sum_even += emu_float(pair << 16) * even[k];
    sum_odd += emu_float(pair & 0xffff0000u) * odd[k];
  }
  _mm512_storeu_ps(sum, _mm512_loadu_ps(sum) + (sum_even + sum_odd));
}

void emu_tile_dpbf16ps(int sum, int a, int b) {
  const char *name = "_tile_dpbf16ps";
  need_tile(name, sum);
  need_tile(name, a);
  need_tile(name, b);
  if (sum == a || sum == b || a == b) emu_fail(name, "a tile twice");
  const int rows = state.tiles[sum].rows, n_pairs = state.tiles[a].row_bytes / 4;
  if (state.tiles[sum].row_bytes % 4 || state.tiles[a].row_bytes % 4) emu_fail(name, "rows that are no whole pairs");
  if (state.tiles[a].rows != rows || state.tiles[b].rows != n_pairs ||
      state.tiles[b].row_bytes != state.tiles[sum].row_bytes)
    emu_fail(name, "shapes that do not fit");
  __m512 even[ROWS_MAX], odd[ROWS_MAX];
  for (int k = 0; k < n_pairs; k++) {
    const emu_u16 pairs = (emu_u16)_mm512_loadu_ps(state.tiles[b].data[k]);
    even[k] = (__m512)(pairs << 16);
    odd[k] = (__m512)(pairs & 0xffff0000u);
  }
  const unsigned before = emu_bf16_control();
  __asm__ volatile("" ::: "memory");
  for (int i = 0; i < rows; i++)
    sum_row((float *)(void *)state.tiles[sum].data[i], state.tiles[a].data[i], even, odd, n_pairs);
  __asm__ volatile("" ::: "memory");
  __builtin_ia32_ldmxcsr(before);
}
