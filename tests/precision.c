/* SPDX-License-Identifier: Apache-2.0
 * Which operand's rounding to bf16 costs how much, and what a second bf16 term for it would bring and cost: the model
 * of model.h on several kinds of inputs, as a table in Markdown. Takes no arguments; see bench/results/precision.md. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "model.h"
#include "oracle.h"

enum { TOKENS = 512, HEADS = 4, DIM = 128, ROW = HEADS * DIM, STATE = HEADS * DIM * DIM };

/* Products of tiles 16 x 16 x 32 in a chunk of 64, per value head, two of which share a q/k head; K = V = 128. */
enum { KS = 128, QS = 128, NR = 32, LV = 16, AV = 48, SK = 128, KK_QK = 40 };
enum { ALL_TILES = KS + QS + NR + LV + AV + SK + KK_QK };

static const struct {
  const char *name;
  struct model model;
  int tiles; /* more than model_bf16 */
} variants[] = {
    {"as built", {0, 1, 1, 1, 0, 1, 1, 1, 1, 0}, 0},
    {"q and k normalised, then rounded", {1, 1, 1, 1, 0, 1, 1, 1, 1, 0}, 0},
    {"R in bf16 only", {0, 1, 1, 1, 1, 1, 1, 1, 1, 0}, 0},
    {"R of N R in two terms", {0, 1, 1, 2, 0, 1, 1, 1, 1, 0}, NR},
    {"N in two terms", {0, 1, 2, 1, 0, 1, 1, 1, 1, 0}, NR},
    {"L in two terms", {0, 1, 1, 1, 0, 2, 1, 1, 1, 0}, LV},
    {"N, L and R in two terms", {0, 1, 2, 2, 0, 2, 1, 1, 1, 0}, 2 * NR + LV},
    {"S in two terms", {0, 2, 1, 1, 0, 1, 1, 1, 1, 0}, KS + QS},
    {"V' of the state in two terms", {0, 1, 1, 1, 0, 1, 1, 1, 2, 0}, SK},
    {"V' of L and A in two terms", {0, 1, 1, 1, 0, 1, 2, 1, 1, 0}, LV + AV},
    {"A in two terms", {0, 1, 1, 1, 0, 1, 1, 2, 1, 0}, AV},
    {"A and V' of L and A in two terms", {0, 1, 1, 1, 0, 1, 2, 2, 1, 0}, LV + 2 * AV},
    {"N and V' of the state in two terms", {0, 1, 2, 1, 0, 1, 1, 1, 2, 0}, NR + SK},
    {"V' everywhere in two terms", {0, 1, 1, 1, 0, 1, 2, 1, 2, 0}, LV + AV + SK},
    {"S and V' everywhere in two terms", {0, 2, 1, 1, 0, 1, 2, 1, 2, 0}, KS + QS + LV + AV + SK},
    {"all in two terms", {0, 2, 2, 2, 0, 2, 2, 2, 2, 0}, KS + QS + 2 * NR + 2 * LV + 2 * AV + SK},
};

/* Keys of each kind; noise is the share of a key that is its own, 1 = random. */
static const struct {
  const char *name;
  uint32_t flags;
  double noise, norm_lo, norm_hi, beta_lo, beta_hi, g_lo;
} kinds[] = {
    {"random", GDN_L2NORM_QK, 1, 1, 1, 0, 1, -0.5},
    {"correlated", GDN_L2NORM_QK, 0.05, 1, 1, 1, 1, 0},
    {"identical", GDN_L2NORM_QK, 0, 1, 1, 1, 1, 0},
    {"raw", 0, 1, 1, 3, 0.2, 0.2, -0.1},
};
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static uint16_t q[TOKENS * ROW], k[TOKENS * ROW], v[TOKENS * ROW];
static float g[TOKENS * HEADS], beta[TOKENS * HEADS], initial[STATE];
static double want_out[TOKENS * ROW], want_states[STATE], out[TOKENS * ROW], states[STATE];

static void fill(int kind, struct check_rng *r) {
  double own[DIM];
  for (int i = 0; i < TOKENS * HEADS; i++) {
    double noise = i < HEADS ? 1 : kinds[kind].noise, sum = 0;
    for (int j = 0; j < DIM; j++) {
      double base = i < HEADS || noise == 1 ? 0 : check_from_bf16(k[i % HEADS * DIM + j]);
      own[j] = base + noise * check_normal(r);
      sum += own[j] * own[j];
    }
    double scale = kinds[kind].flags ? 1 : check_uniform(r, kinds[kind].norm_lo, kinds[kind].norm_hi) / sqrt(sum);
    for (int j = 0; j < DIM; j++) {
      k[i * DIM + j] = check_to_bf16((float)(scale * own[j]));
      q[i * DIM + j] = check_to_bf16((float)check_normal(r));
      v[i * DIM + j] = check_to_bf16((float)check_normal(r));
    }
    g[i] = (float)check_uniform(r, kinds[kind].g_lo, 0);
    beta[i] = (float)check_uniform(r, kinds[kind].beta_lo, kinds[kind].beta_hi);
  }
  for (int i = 0; i < STATE; i++) initial[i] = (float)(0.3 * check_normal(r));
}

static const int32_t cu_seqlens[] = {0, TOKENS};

static gdn_prefill_args make_args(int kind) {
  return (gdn_prefill_args){.struct_size = sizeof(gdn_prefill_args),
                            .flags = kinds[kind].flags,
                            .n_seqs = 1,
                            .n_tokens = TOKENS,
                            .n_heads_k = HEADS,
                            .n_heads_v = HEADS,
                            .dim_k = DIM,
                            .dim_v = DIM,
                            .cu_seqlens = cu_seqlens,
                            .q = {.data = q},
                            .k = {.data = k},
                            .v = {.data = v},
                            .g = {.data = g},
                            .beta = {.data = beta},
                            .initial_state = {.data = initial, .n_rows = 1}};
}

int main(void) {
  static double errors[COUNT(variants)][COUNT(kinds)][2];
  for (int kind = 0; kind < COUNT(kinds); kind++) {
    struct check_rng r = check_case("precision/%s", kinds[kind].name);
    fill(kind, &r);
    const gdn_prefill_args a = make_args(kind);
    oracle_prefill(&a, want_out, want_states);
    for (int i = 0; i < COUNT(variants); i++) {
      model_prefill(&variants[i].model, &a, out, states);
      errors[i][kind][0] = model_error(out, want_out, TOKENS * ROW);
      errors[i][kind][1] = model_error(states, want_states, STATE);
    }
  }
  printf("| operands | tile products |");
  for (int kind = 0; kind < COUNT(kinds); kind++) printf(" %s |", kinds[kind].name);
  printf("\n|---|---|");
  for (int kind = 0; kind < COUNT(kinds); kind++) printf("---|");
  for (int i = 0; i < COUNT(variants); i++) {
    printf("\n| %s | %+.0f %% |", variants[i].name, 100.0 * variants[i].tiles / ALL_TILES);
    for (int kind = 0; kind < COUNT(kinds); kind++) printf(" %.1e, %.1e |", errors[i][kind][0], errors[i][kind][1]);
  }
  printf("\n");
  return 0;
}
