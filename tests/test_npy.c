/* SPDX-License-Identifier: Apache-2.0
 * The .npy reader of gdn-bench: good files, malformed ones, truncation at every byte and every byte changed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "npy.h"

#define FILE_BYTES_MAX 512

static char directory[] = "/tmp/gdn-npy-XXXXXX";
static char path[64];
static char error[160];

static void write_file(const unsigned char *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(bytes, 1, n, f), n);
  assert_int_equal(fclose(f), 0);
}

/* A file of this version, header text and n_data bytes 0, 1, 2, ..; returns its length. */
static size_t make_file(unsigned char *bytes, int major, const char *header, size_t n_data) {
  size_t n_header = strlen(header);
  size_t n = 0;
  memcpy(bytes, "\x93NUMPY", 6);
  bytes[6] = (unsigned char)major;
  bytes[7] = 0;
  n = 8;
  for (int i = 0; i < (major == 1 ? 2 : 4); i++) {
    bytes[n++] = (unsigned char)(n_header >> 8 * i);
  }
  memcpy(bytes + n, header, n_header);
  n += n_header;
  assert_true(n + n_data <= FILE_BYTES_MAX);
  for (size_t i = 0; i < n_data; i++) {
    bytes[n++] = (unsigned char)i;
  }
  return n;
}

static int load(int major, const char *header, size_t n_data, struct npy *a) {
  unsigned char bytes[FILE_BYTES_MAX];
  write_file(bytes, make_file(bytes, major, header, n_data));
  error[0] = '\0';
  return npy_load(path, a, error, sizeof error);
}

static void load_good_file_gives_type_shape_and_data(void **state) {
  static const struct {
    int major;
    const char *header;
    enum npy_type type;
    int n_dims;
    int64_t n_elems;
    size_t n_data;
  } cases[] = {
      {1, "{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }  \n", NPY_U16, 2, 6, 12},
      {2, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", NPY_F32, 2, 6, 24},
      {1, "{\"shape\":(5,),\"fortran_order\":False,\"descr\":\"<i4\"}", NPY_I32, 1, 5, 20},
      {1, "{'descr': '<i8', 'fortran_order': False, 'shape': (1,2,1,2)}", NPY_I64, 4, 4, 32},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': ()}", NPY_F32, 0, 1, 4},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775807)}", NPY_F32, 2, 0, 0},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct npy a;
    if (load(cases[i].major, cases[i].header, cases[i].n_data, &a) != 0) {
      fail_msg("%s: %s", cases[i].header, error);
    }
    assert_int_equal(a.type, cases[i].type);
    assert_int_equal(a.n_dims, cases[i].n_dims);
    assert_int_equal(a.n_elems, cases[i].n_elems);
    assert_non_null(a.data);
    for (size_t b = 0; b < cases[i].n_data; b++) {
      assert_int_equal(((unsigned char *)a.data)[b], b);
    }
    npy_free(&a);
    assert_null(a.data);
  }
}

static void load_malformed_file_names_what_is_wrong(void **state) {
  static const struct {
    int major;
    const char *header;
    size_t n_data;
    const char *text;
  } cases[] = {
      {3, "{'descr': '<u2', 'fortran_order': False, 'shape': (2,)}", 4, "version 3.0"},
      {1, "{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}", 4, "\">f4\""},
      {1, "{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", 8, "\"<f8\""},
      {1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4, "descr"},
      {1, "{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}", 4, "Fortran"},
      {1, "{'descr': '<f4', 'fortran_order': None, 'shape': (1,)}", 4, "fortran_order"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 4, "need 8 bytes of data, the file has 4"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 5, "need 4 bytes of data, the file has 5"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", 4, "shape"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': 1}", 4, "shape"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}", 8, "shape"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1)}", 4, "shape"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}", 4, "shape"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", 4, "too many"},
      {1, "{'descr': '<f4', 'fortran_order': False}", 4, "lacks"},
      {1, "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}", 4, "repeated"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': 1}", 4, "unknown"},
      {1, "{'descr': '<f4' 'fortran_order': False, 'shape': ()}", 4, "commas"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x", 4, "after its dictionary"},
      {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (", 4, "shape"},
      {1, "", 4, "not a dictionary"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct npy a;
    assert_int_not_equal(load(cases[i].major, cases[i].header, cases[i].n_data, &a), 0);
    if (!strstr(error, cases[i].text)) {
      fail_msg("%s: \"%s\" does not name \"%s\"", cases[i].header, error, cases[i].text);
    }
    assert_null(a.data);
  }
}

static void load_without_regular_file_says_so(void **state) {
  struct npy a;
  (void)state;
  assert_int_not_equal(npy_load("/nonexistent/q.npy", &a, error, sizeof error), 0);
  assert_non_null(strstr(error, "cannot open"));
  assert_int_not_equal(npy_load(directory, &a, error, sizeof error), 0);
  assert_non_null(strstr(error, "not a regular file"));
}

static void load_header_longer_than_file_fails(void **state) {
  static const unsigned char bytes[] = {0x93, 'N', 'U', 'M', 'P', 'Y', 2, 0, 0xFF, 0xFF, 0xFF, 0xFF, '{', '}'};
  struct npy a;
  (void)state;
  write_file(bytes, sizeof bytes);
  assert_int_not_equal(npy_load(path, &a, error, sizeof error), 0);
  assert_non_null(strstr(error, "4294967295"));
}

static const char small_header[] = "{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }\n";

static void load_truncated_at_every_byte_fails(void **state) {
  unsigned char bytes[FILE_BYTES_MAX];
  size_t n = make_file(bytes, 1, small_header, 12);
  (void)state;
  for (size_t kept = 0; kept < n; kept++) {
    struct npy a;
    write_file(bytes, kept);
    error[0] = '\0';
    assert_int_not_equal(npy_load(path, &a, error, sizeof error), 0);
    assert_int_not_equal(error[0], '\0');
    assert_null(a.data);
  }
}

/* Some changes leave a valid file; none may read or allocate beyond it, which a sanitizer sees. */
static void load_with_any_byte_changed_is_safe(void **state) {
  static const unsigned char values[] = {0, 1, ' ', '\'', '(', ')', ',', '9', '}', 0x7F, 0xFF};
  unsigned char bytes[FILE_BYTES_MAX];
  size_t n = make_file(bytes, 1, small_header, 12);
  (void)state;
  for (size_t at = 0; at < n - 12; at++) {
    unsigned char kept = bytes[at];
    for (size_t i = 0; i < sizeof values; i++) {
      struct npy a;
      bytes[at] = values[i];
      write_file(bytes, n);
      if (npy_load(path, &a, error, sizeof error) == 0) {
        assert_true(a.n_elems * 2 <= (int64_t)n);
        npy_free(&a);
      }
    }
    bytes[at] = kept;
  }
}

static int make_directory(void **state) {
  (void)state;
  if (!mkdtemp(directory)) {
    return -1;
  }
  snprintf(path, sizeof path, "%s/a.npy", directory);
  return 0;
}

static int remove_directory(void **state) {
  (void)state;
  unlink(path);
  return rmdir(directory);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(load_good_file_gives_type_shape_and_data),
      cmocka_unit_test(load_malformed_file_names_what_is_wrong),
      cmocka_unit_test(load_without_regular_file_says_so),
      cmocka_unit_test(load_header_longer_than_file_fails),
      cmocka_unit_test(load_truncated_at_every_byte_fails),
      cmocka_unit_test(load_with_any_byte_changed_is_safe),
  };
  return cmocka_run_group_tests_name("npy", tests, make_directory, remove_directory);
}
