/* Rows made up on the spot, as one would write them in a table, and two formats of several buffers. */
#ifndef TE_TEST_ROWS_H
#define TE_TEST_ROWS_H

#include "te_spec.h"

#include <string.h>

#define IN(name, type) \
  { false, name, type }
#define OUT(name, type) \
  { true, name, type }
#define SLOTS(...) ((const te_slot_row[]){__VA_ARGS__, {false, NULL, NULL}})

static const te_format_row test_formats[] = {
    {"pair", "bytes with a scale for every 32 of a row",
     (const te_buffer_row[]){{"data", "u8 [*M, K]"}, {"scale", "f32 [M, ceil(K, 32)]"}, {NULL, NULL}}},
    {"triple", "fp8 with a scale for every 128 x 128 block and the largest magnitude",
     (const te_buffer_row[]){{"data", "e4m3 [*M, K]"},
                             {"scale", "f32 [ceil(M, 128), up(ceil(K, 128), 4)]"},
                             {"amax", "f32 [1]"},
                             {NULL, NULL}}},
    {NULL, NULL, NULL}};

static inline int parse_row(const te_slot_row *slots, te_op *op, te_status *status) {
  te_op_row *row = &(te_op_row){"t", "made up", slots, NULL, NULL};
  *status = (te_status){0};
  int rc = te__parse_op("test", test_formats, row, op, status);
  op->row = NULL; /* it dies with this frame */
  return rc;
}

#endif
