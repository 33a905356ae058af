/* SPDX-License-Identifier: Apache-2.0
 * The model of model.h against the rule and against rounding theory: with nothing rounded it is the rule; with operands
 * in bf16 its error is what first-order analysis makes of independent roundings and of this input's own T. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "model.h"

enum { C = MODEL_TOKENS, B = C / 2, K = 128, V = 64 };

/* bf16 keeps 8 bits: a rounding is off by up to half a unit, 2^-8 / sqrt(3) of the power of two below in the root mean
 * square, and numbers spread evenly over their logarithm are sqrt(2 ln 2 / (1 - 1 / 4)) times that power. */
#define RHO (0x1p-8 * 0.57735 / 1.35955)

/* ---- inputs ---- */

/* noise: the share of a key that is its own. */
static const struct kind {
  const char *name;
  double noise, norm_lo, norm_hi, beta_lo, beta_hi, g_lo, state;
} kinds[] = {{"random", 1, 1, 1, 0, 1, -0.5, 0.3},     {"zero_state", 1, 1, 1, 0, 1, -0.1, 0},
             {"correlated", 0.05, 1, 1, 1, 1, 0, 0.3}, {"half_correlated", 0.7, 1, 1, 0.5, 1, -0.05, 0.3},
             {"identical", 0, 1, 1, 1, 1, 0, 0.3},     {"raw_stable", 1, 1, 3, 0.2, 0.2, -0.1, 0.3},
             {"strong_decay", 1, 1, 1, 0, 1, -20, 1}};
#define N_KINDS ((int)(sizeof kinds / sizeof kinds[0]))

static double bf16(double x) {
  return (double)check_from_bf16(check_to_bf16((float)x));
}

/* n < C leaves the second block out or short. */
static void make_chunk(const struct kind *kind, int n, struct check_rng *r, struct model_chunk *c, double *state) {
  double common[K];
  c->n = n;
  c->dim_k = K;
  c->dim_v = V;
  for (int i = 0; i < K; i++) common[i] = check_normal(r);
  for (int i = 0; i < n; i++) {
    double sum = 0;
    for (int j = 0; j < K; j++) {
      double own = (kind->noise < 1 ? common[j] : 0) + kind->noise * check_normal(r);
      c->q[i * K + j] = bf16(check_normal(r));
      c->k[i * K + j] = bf16(own);
      sum += c->k[i * K + j] * c->k[i * K + j];
    }
    for (int j = 0; j < V; j++) c->v[i * V + j] = bf16(check_normal(r));
    c->q_mult[i] = 1.0 / K;
    c->k_mult[i] = check_uniform(r, kind->norm_lo, kind->norm_hi) / sqrt(sum);
    c->decay[i] = exp(check_uniform(r, kind->g_lo, 0));
    c->beta[i] = check_uniform(r, kind->beta_lo, kind->beta_hi);
  }
  for (int i = 0; i < K * V; i++) state[i] = kind->state * check_normal(r);
}

/* Token by token. */
static void rule(const struct model_chunk *c, double *state, double *out) {
  for (int i = 0; i < c->n; i++)
    for (int v = 0; v < V; v++) {
      double kept = 0, seen = 0;
      for (int j = 0; j < K; j++) kept += (state[j * V + v] *= c->decay[i]) * c->k[i * K + j] * c->k_mult[i];
      double delta = c->beta[i] * (c->v[i * V + v] - kept);
      for (int j = 0; j < K; j++)
        seen += (state[j * V + v] += delta * c->k[i * K + j] * c->k_mult[i]) * c->q[i * K + j] * c->q_mult[i];
      out[i * V + v] = seen;
    }
}

/* ---- first-order analysis ---- */

/* The chunk form's matrices, exact; rows and columns from n on are zero. */
struct analysis {
  double k[C][K], q[C][K];                   /* with their factors */
  double l[C][C], a[C][C], t[C][C], n[C][C]; /* t: (I + L)^-1; n: T - I inside the diagonal blocks */
  double resid[C][V], delta[C][V];           /* R, less L V' of the first block; V' */
  double decay_in[C], decay_out[C];
  /* What a unit error of row i does: of V' as made by its own block, which the second block's R sees too; of R of the
   * second block; of V' as operand of L and A; of S. Squares summed over out, and over the state. */
  double of_delta[2][C], of_resid[2][C], of_operand[2][C], of_state[2][K];
};

static double sum_squares(const double *x, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  return sum;
}

static void make_matrices(const struct model_chunk *c, struct analysis *x) {
  for (int i = 0; i < c->n; i++) {
    double through = 1;
    for (int m = 0; m < K; m++) {
      x->k[i][m] = c->k[i * K + m] * c->k_mult[i];
      x->q[i][m] = c->q[i * K + m] * c->q_mult[i];
    }
    for (int j = i; j >= 0; j--) {
      for (int m = 0; m < K; m++) {
        x->a[i][j] += through * x->q[i][m] * x->k[j][m];
        x->l[i][j] += j < i ? c->beta[i] * through * x->k[i][m] * x->k[j][m] : 0;
      }
      through *= c->decay[j];
    }
    x->decay_in[i] = through;
    x->t[i][i] = 1;
    for (int j = 0; j < i; j++) {
      for (int p = j; p < i; p++) x->t[i][j] -= x->l[i][p] * x->t[p][j];
      if (i / B == j / B) x->n[i][j] = x->t[i][j];
    }
  }
  x->decay_out[c->n - 1] = 1;
  for (int i = c->n - 2; i >= 0; i--) x->decay_out[i] = x->decay_out[i + 1] * c->decay[i + 1];
}

static void make_rows(const struct model_chunk *c, const double *state, struct analysis *x) {
  for (int v = 0; v < V; v++)
    for (int i = 0; i < c->n; i++) {
      double kept = 0;
      for (int m = 0; m < K; m++) kept += x->k[i][m] * state[m * V + v];
      x->resid[i][v] = c->beta[i] * (c->v[i * V + v] - x->decay_in[i] * kept);
      for (int j = 0; i >= B && j < B; j++) x->resid[i][v] -= x->l[i][j] * x->delta[j][v];
      x->delta[i][v] = x->resid[i][v];
      for (int j = i / B * B; j < i; j++) x->delta[i][v] += x->n[i][j] * x->resid[j][v];
    }
}

/* Adds up what errors y [C] of V' do to out and to the state. */
static void respond(const struct analysis *x, const double *y, int n, double *out, double *state) {
  for (int i = 0; i < n; i++) {
    double sum = 0;
    for (int j = 0; j <= i; j++) sum += x->a[i][j] * y[j];
    *out += sum * sum;
  }
  for (int m = 0; m < K; m++) {
    double sum = 0;
    for (int j = 0; j < n; j++) sum += x->decay_out[j] * x->k[j][m] * y[j];
    *state += sum * sum;
  }
}

/* y += weight times what an error of the second block's R at row i makes of V'. */
static void through_second(const struct analysis *x, int i, double weight, int n, double *y) {
  for (int p = i; p < n; p++) y[p] += weight * x->t[p][i];
}

/* y: errors of V' of the blocks, the first's as the second sees them. */
static void spread(const struct analysis *x, int n, double *y) {
  for (int i = B; i < n; i++)
    for (int j = 0; j < B; j++) through_second(x, i, -x->l[i][j] * y[j], n, y);
}

static void make_responses(const struct model_chunk *c, struct analysis *x) {
  const int n = c->n;
  for (int i = 0; i < n; i++) {
    double delta[C] = {0}, resid[C] = {0}, operand[C] = {0};
    delta[i] = 1;
    spread(x, n, delta);
    respond(x, delta, n, &x->of_delta[0][i], &x->of_delta[1][i]);
    for (int p = i + 1; p < n; p++) resid[p] = x->n[p][i];
    spread(x, n, resid);
    respond(x, resid, n, &x->of_resid[0][i], &x->of_resid[1][i]);
    operand[i] = i < B;
    spread(x, n, operand);
    operand[i] = 1; /* of A V' and of the state, as of the second block */
    respond(x, operand, n, &x->of_operand[0][i], &x->of_operand[1][i]);
  }
  for (int m = 0; m < K; m++) {
    double y[C] = {0}, none = 0;
    for (int i = 0; i < n; i++)
      for (int j = 0; j <= i; j++) y[i] -= x->t[i][j] * c->beta[j] * x->decay_in[j] * x->k[j][m];
    respond(x, y, n, &none, &x->of_state[1][m]);
    for (int i = 0; i < n; i++) {
      double sum = x->decay_in[i] * x->q[i][m];
      for (int j = 0; j <= i; j++) sum += x->a[i][j] * y[j];
      x->of_state[0][m] += sum * sum;
    }
  }
}

/* Root of the expected squared error of out (0) or of the state (1). */
static double expected(const struct model_chunk *c, const struct analysis *x, const double *state, int of) {
  double sum = 0;
  int steep = 0; /* then V' is rounded once more for the state, but for the last row, whose factor is 1 */
  for (int i = 0; i < c->n; i++) steep |= x->decay_in[i] < 0x1p-60;
  for (int i = 0; i < c->n; i++) {
    const double resid = sum_squares(x->resid[i], V), delta = sum_squares(x->delta[i], V);
    double second[C] = {0}, response[2] = {0, 0};
    if (i >= B) through_second(x, i, 1, c->n, second);
    respond(x, second, c->n, &response[0], &response[1]);
    for (int j = 0; j < i; j++) {
      const double n_r = x->n[i][j] * x->n[i][j] * sum_squares(x->resid[j], V);
      const double l_delta = x->l[i][j] * x->l[i][j] * sum_squares(x->delta[j], V);
      sum += n_r * x->of_delta[of][i];
      if (i >= B && j < B) sum += l_delta * response[of];
    }
    for (int j = 0; j <= i && of == 0; j++) sum += x->a[i][j] * x->a[i][j] * sum_squares(x->delta[j], V);
    sum += resid * x->of_resid[of][i] + delta * x->of_operand[of][i];
    if (of == 1 && steep && i < c->n - 1) sum += delta * x->decay_out[i] * x->decay_out[i] * sum_squares(x->k[i], K);
  }
  for (int m = 0; m < K; m++) sum += sum_squares(state + m * V, V) * x->of_state[of][m];
  return RHO * sqrt(sum);
}

/* ---- tests ---- */

struct results {
  double state[K * V], out[C * V];
};

static struct results *run_model(const struct model *m, const struct model_chunk *c, const double *state) {
  struct results *r = check_alloc(sizeof *r);
  memcpy(r->state, state, sizeof r->state);
  model_run_chunk(m, c, r->state, r->out);
  return r;
}

static void check_kind(const struct kind *kind, int n) {
  struct check_rng r = check_case("model/%s/n%d", kind->name, n);
  struct model_chunk *c = check_alloc(sizeof *c);
  struct results *want = check_alloc(sizeof *want);
  struct analysis *x = check_alloc(sizeof *x);
  double *state = check_alloc(sizeof want->state);
  const struct model exact = {0};
  make_chunk(kind, n, &r, c, state);
  memcpy(want->state, state, sizeof want->state);
  rule(c, want->state, want->out);
  const struct results *same = run_model(&exact, c, state), *model = run_model(&model_bf16, c, state);
  check_limit("exact out", model_error(same->out, want->out, n * V), 1e-12);
  check_limit("exact state", model_error(same->state, want->state, K * V), 1e-12);

  memset(x, 0, sizeof *x);
  make_matrices(c, x);
  make_rows(c, state, x);
  make_responses(c, x);
  double out = expected(c, x, state, 0) / sqrt(sum_squares(want->out, n * V));
  double final = expected(c, x, state, 1) / sqrt(sum_squares(want->state, K * V));
  double out_ratio = model_error(model->out, want->out, n * V) / out;
  double state_ratio = model_error(model->state, want->state, K * V) / final;
  /* Roundings of numbers that repeat, as all of L and A where keys do, are neither independent nor of average size. */
  const double factor = kind->noise == 0 ? 2.5 : kind->noise < 0.5 ? 2 : 1.4;
  check_limit("log of out's error over the expected one", fabs(log(out_ratio)), log(factor));
  check_limit("log of the state's error over the expected one", fabs(log(state_ratio)), log(factor));
  check_free_all();
}

static void model_errors_are_those_of_first_order_analysis(void **state) {
  (void)state;
  static const int lens[] = {17, 32, 49, C};
  for (int i = 0; i < N_KINDS; i++)
    for (int j = 0; j < 4; j++) check_kind(&kinds[i], lens[j]);
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(model_errors_are_those_of_first_order_analysis, check_teardown)};
  return check_summary("test_model", cmocka_run_group_tests(tests, NULL, NULL));
}
