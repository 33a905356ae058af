/* SPDX-License-Identifier: Apache-2.0
 * Output of the tool: one JSON document, or an aligned table for people. */
#ifndef GDN_BENCH_REPORT_H
#define GDN_BENCH_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* ---- JSON: key is null inside an array and for the document itself ---- */

struct json {
  FILE *file;
  int depth;
  bool empty; /* nothing written yet in the innermost object or array */
};

void json_begin_object(struct json *j, const char *key);
void json_end_object(struct json *j);
void json_begin_array(struct json *j, const char *key);
void json_end_array(struct json *j);
void json_string(struct json *j, const char *key, const char *text);
void json_int(struct json *j, const char *key, int64_t value);
/* Numbers that JSON cannot say (NaN, infinities) become null. */
void json_number(struct json *j, const char *key, double value);
void json_bool(struct json *j, const char *key, bool value);
void json_null(struct json *j, const char *key);

/* ---- tables: first column to the left, the others to the right ---- */

#define TABLE_COLUMNS_MAX 12
#define TABLE_CELL_BYTES 64

struct table {
  int n_columns;
  int n_cells, n_cells_max;
  char (*cells)[TABLE_CELL_BYTES];
  bool out_of_memory;
};

/* headers: n_columns texts. */
void table_begin(struct table *t, int n_columns, const char *const *headers);
__attribute__((format(printf, 2, 3))) void table_cell(struct table *t, const char *format, ...);
/* Prints and frees; false when memory ran out on the way. */
bool table_end(struct table *t, FILE *file);

/* One line "name   value" of a list. */
__attribute__((format(printf, 2, 3))) void report_line(const char *name, const char *format, ...);
/* 12345678 -> "12 345 678"; text holds at least 32 bytes. */
const char *report_grouped(int64_t value, char *text);

#endif
