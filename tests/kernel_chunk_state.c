/* SPDX-License-Identifier: Apache-2.0
 * The state in the chunk form, which every tier must treat alike whatever its operands are: on its way to them and
 * back, inside a chunk, and in columns that a call was not given. */
#include <math.h>
#include <string.h>

#include "kernel_chunk.h"

static size_t state_bytes(const struct kcase *c) {
  return (size_t)c->K * (size_t)c->V * 4;
}

/* Brings state up to date. What a tier of bf16 operands does not write of it is poison. */
static void end_chunks(const struct kcase *c, struct gdn_chunk *x, int col, int n_cols) {
  if (bf16_chunks(c->tier)) check_poison(x->state, state_bytes(c));
  c->tier->chunk_end(x, col, n_cols);
}

/* ---- to the operands and back ---- */

/* Of any bits, and often those at which a split or a rounding of them may go wrong. */
static uint32_t *odd_state(struct kcase *c) {
  static const uint32_t odd[] = {
      0,          0x80000000,                                     /* zeros */
      1,          0x80000001, 0x00007fff, 0x00008000, 0x807fffff, /* subnormal numbers */
      0x7f7fffff, 0xff7fffff, 0x7f7f8000,                         /* infinite as bf16 */
      0x7f800000, 0xff800000,                                     /* infinite */
      0x7fc00000, 0xffc00000, 0x7f800001, 0x7fffffff, 0xffffffff, /* NaN */
      0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001,             /* between two of bf16 */
  };
  uint32_t *bits = check_alloc(state_bytes(c));
  for (int i = 0; i < c->K * c->V; i++) {
    uint64_t r = check_random_u64(&c->rng);
    bits[i] = r >> 60 < 4 ? odd[(r >> 32) % (sizeof odd / sizeof odd[0])] : (uint32_t)r;
  }
  return bits;
}

/* The same bits, or NaN both. */
static void check_same_floats(const char *what, const float *state, const uint32_t *want, int n) {
  for (int i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &state[i], 4);
    if (bits != want[i] && !((bits & 0x7fffffff) > 0x7f800000 && (want[i] & 0x7fffffff) > 0x7f800000))
      check_fail("%s: element %d of %d: %#x, should be %#x", what, i, n, bits, want[i]);
  }
}

/* begin takes these columns of a second state, and end gives them back, and only them. */
static void check_begin_end(struct kcase *c, int col, int n_cols) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x = make_chunk(c, &d, c->tier != c->ref, GDN_ROWS_F32);
  uint32_t *want = odd_state(c), *second = odd_state(c);
  const size_t from = (size_t)(col * c->K), n = (size_t)(n_cols * c->K), all = state_bytes(c) / 4;
  memcpy(x->state, want, all * 4);
  c->tier->chunk_begin(x, 0, c->V);
  memcpy(x->state, second, all * 4);
  c->tier->chunk_begin(x, col, n_cols);
  check_same_bits("state before the columns, after begin", x->state, second, from * 4, 4);
  check_same_bits("state after the columns, after begin", x->state + from + n, second + from + n, (all - from - n) * 4,
                  4);
  memcpy(want + from, second + from, n * 4);
  end_chunks(c, x, 0, c->V);
  /* Where begin has nothing to do, the second state is all there is. */
  check_same_floats("state after begin and end", x->state, bf16_chunks(c->tier) ? want : second, (int)all);
  if (!bf16_chunks(c->tier)) memcpy(want, second, all * 4);
  end_chunks(c, x, col, n_cols);
  check_same_floats("state after end of some columns", x->state + from, want + from, (int)n);
  if (bf16_chunks(c->tier)) {
    if (!check_is_poison(x->state, from * 4)) check_fail("end wrote before column %d", col);
    if (!check_is_poison(x->state + from + n, (all - from - n) * 4))
      check_fail("end wrote after column %d", col + n_cols - 1);
  }
}

/* ---- in between ---- */

/* The next chunk runs alike on what chunk_state left, after end, and after begin on what end gave. */
static void check_end_changes_nothing(struct kcase *c) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x[3];
  for (int i = 0; i < 3; i++) {
    x[i] = run_chunks(c, c->tier, &d, c->V, i == 0 ? STATE : END, GDN_ROWS_F32);
    if (i == 2) c->tier->chunk_begin(x[i], 0, c->V);
    run_columns(c->tier, x[i], 0, c->V, END);
    if (i == 0) continue;
    check_same_out(i == 1 ? "out after end" : "out after begin on the new state", x[0], x[i]);
    check_same_bits("state after that", x[0]->state, x[i]->state, state_bytes(c), 4);
  }
}

/* Rows of floats or bf16, poison outside the columns. */
static void check_poison_beside(const char *what, const struct gdn_rows_out *rows, int n, int V, int col, int n_cols) {
  const size_t bytes = (size_t)elem_bytes(rows->dtype);
  for (int i = 0; i < n; i++) {
    const char *row = (const char *)rows->data + (size_t)(i * rows->stride_elems) * bytes;
    if (!check_is_poison(row, (size_t)col * bytes)) check_fail("%s: row %d written before column %d", what, i, col);
    if (!check_is_poison(row + (size_t)(col + n_cols) * bytes, (size_t)(V - col - n_cols) * bytes))
      check_fail("%s: row %d written after column %d", what, i, col + n_cols - 1);
  }
}

/* delta up to last on these columns change nothing of the others, nor of any state before chunk_state. */
static void check_beside(struct kcase *c, int col, int n_cols, enum stage last) {
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x = make_chunk(c, &d, c->tier != c->ref, GDN_ROWS_F32);
  if (c->n == GDN_CHUNK) x->out_rows = poison_rows(GDN_CHUNK, c->V, 32, GDN_ROWS_BF16); /* in whole lines */
  set_chunk(x, &d, FIRST_LEN, c->n);
  run_stages(c->tier, x, c->V, 1, BEGIN);
  run_columns(c->tier, x, col, n_cols, last);
  end_chunks(c, x, 0, c->V);
  const int64_t from = (int64_t)col * c->K, end = (int64_t)(last < STATE ? col : col + n_cols) * c->K;
  check_same_bits("state before the columns", x->state, d.state, (size_t)from * 4, 4);
  check_same_bits("state after the columns", x->state + end, d.state + end, state_bytes(c) - (size_t)end * 4, 4);
  check_poison_beside("out", &x->out_rows, c->n, c->V, col, n_cols);
  check_poison_beside("delta", &(struct gdn_rows_out){x->delta_f32, c->V, GDN_ROWS_F32}, x->n16, c->V, col, n_cols);
}

void check_chunk_end(struct kcase *c) {
  check_begin_end(c, 0, c->V);
  /* Every column but the last panel's, then every one but the first's. */
  for (int col = 0; col <= GDN_PANEL && c->V > GDN_PANEL; col += GDN_PANEL) {
    check_begin_end(c, col, c->V - GDN_PANEL);
    check_beside(c, col, c->V - GDN_PANEL, OUT);
    check_beside(c, col, c->V - GDN_PANEL, STATE);
  }
  check_end_changes_nothing(c);
  struct chunk_data d = random_chunks(c);
  struct gdn_chunk *x = run_chunks(c, c->tier, &d, c->V, END, GDN_ROWS_F32);
  BENCH(c, c->ref->chunk_end(x, 0, c->V), c->tier->chunk_end(x, 0, c->V));
}

/* ---- inside a chunk ---- */

/* The state inside a sequence's first chunk, from zeros in memory and from the word that there are none. */
static void check_state_at_from_zero(struct kcase *c) {
  struct chunk_data d = random_chunks(c);
  for (int n_at = c->n - 1; n_at > 0 && c->tier->knows_zero; n_at /= 2) {
    float *panels[2];
    for (int in_memory = 0; in_memory < 2; in_memory++) {
      struct gdn_chunk *x = make_chunk(c, &d, 1, GDN_ROWS_F32);
      set_chunk(x, &d, FIRST_LEN, c->n);
      start_from_zero(x, in_memory);
      run_stages(c->tier, x, c->V, in_memory, OUT);
      panels[in_memory] = alloc_f32((int64_t)c->K * c->V);
      c->tier->chunk_state_at(x, n_at, 0, c->V, panels[in_memory]);
    }
    check_same_bits("state inside a first chunk", panels[0], panels[1], state_bytes(c), 4);
  }
}

/* The state inside a chunk is the one that a chunk of those tokens leaves, and asking for it changes nothing else. */
static void check_state_at(struct kcase *c, const struct chunk_data *d) {
  struct gdn_chunk *undisturbed = run_chunks(c, c->tier, d, c->V, END, GDN_ROWS_F32);
  int64_t n_state = (int64_t)c->K * c->V;
  float *whole = alloc_f32(n_state), *panels = alloc_f32(n_state);
  for (int n_at = 1; n_at < c->n; n_at = n_at * 3 + 2) {
    struct gdn_chunk *x = run_chunks(c, c->tier, d, c->V, OUT, GDN_ROWS_F32);
    c->tier->chunk_state_at(x, n_at, 0, c->V, whole);
    for (int col = 0; col < c->V; col += 32) {
      /* A bf16 tier's V' holds the columns of the last calls only. */
      struct gdn_chunk *part = bf16_chunks(c->tier) ? run_chunks(c, c->tier, d, 32, OUT, GDN_ROWS_F32) : x;
      if (bf16_chunks(c->tier)) run_columns(c->tier, part, col, 32, OUT);
      c->tier->chunk_state_at(part, n_at, col, 32, panels + (int64_t)col * c->K);
    }
    check_same_bits("state inside the chunk in slices", whole, panels, (size_t)n_state * 4, 4);
    struct kcase part = *c;
    part.n = n_at;
    struct gdn_chunk *want = run_chunks(&part, c->ref, d, c->V, END, GDN_ROWS_F32);
    double limit = bf16_chunks(c->tier) ? bf16_state_at_limit(c, d, n_at, want->state) : chunk_limit(c);
    check_close_f32("state inside the chunk", whole, want->state, n_state, limit);
    c->tier->chunk_state(x, 0, c->V);
    c->tier->chunk_end(x, 0, c->V);
    check_same_bits("state after it", x->state, undisturbed->state, (size_t)n_state * 4, 4);
  }
}

void check_chunk_state_at(struct kcase *c) {
  struct chunk_data d = random_chunks(c), gentle = random_chunks(c);
  float *whole = alloc_f32((int64_t)c->K * c->V);
  make_gentle(c, &gentle);
  check_state_at(c, &d);
  check_state_at(c, &gentle);
  check_state_at_from_zero(c);
  if (c->n > 1) {
    struct gdn_chunk *ref = run_chunks(c, c->ref, &d, c->V, OUT, GDN_ROWS_F32);
    struct gdn_chunk *x = run_chunks(c, c->tier, &d, c->V, OUT, GDN_ROWS_F32);
    BENCH(c, c->ref->chunk_state_at(ref, c->n - 1, 0, c->V, whole),
          c->tier->chunk_state_at(x, c->n - 1, 0, c->V, whole));
  }
}
