/* A table of a user's own: a made-up format of two buffers, and operators that take and return it.
 * Built by test_formats.py as a library of its own; it knows te_ops.h and nothing else of te_ops. */
#include "te_ops.h"

#include <math.h>

/* codes are x / scale rounded to integers, with one scale for each row of the flattened matrix */
static int encode(const te_context *ctx, const te_arg *args) {
  const te_tensor *x = args[0].buf, *codes = &args[1].buf[0], *scale = &args[1].buf[1];
  int64_t k = x->ndim ? x->sizes[x->ndim - 1] : 1;
  (void)ctx;
  for (int64_t r = 0; r < scale->sizes[0]; r++) {
    const float *row = (const float *)x->data + r * k;
    float largest = 0;
    for (int64_t c = 0; c < k; c++) largest = fmaxf(largest, fabsf(row[c]));
    ((float *)scale->data)[r] = largest > 0 ? largest / 127 : 1;
    for (int64_t c = 0; c < k; c++)
      ((int8_t *)codes->data)[r * k + c] = (int8_t)lrintf(row[c] / ((float *)scale->data)[r]);
  }
  return TE_OK;
}

static int decode(const te_context *ctx, const te_arg *args) {
  const te_arg *q = &args[0], *extra = &args[1], *y = &args[3];
  const te_tensor *codes = &q->buf[0], *scale = &q->buf[1];
  int64_t k = codes->sizes[codes->ndim - 1];
  if (args[2].i < 0)
    return ctx->services->fail(ctx->status, "%s: sign = %d: must not be negative", ctx->op, (int)args[2].i);
  for (int64_t r = 0; r < scale->sizes[0]; r++)
    for (int64_t c = 0; c < k; c++) {
      float value = (float)((const int8_t *)codes->data)[r * k + c] * ((const float *)scale->data)[r];
      if (extra->present)
        value +=
            (float)((const int8_t *)extra->buf[0].data)[r * k + c] * ((const float *)extra->buf[1].data)[r];
      ((float *)y->buf->data)[r * k + c] = value;
    }
  return TE_OK;
}

TE_API const te_format_row test_formats[] = {
    {"rowint8", "int8 with one fp32 scale a row",
     (const te_buffer_row[]){{"codes", "i8 [*M, K]"}, {"scale", "f32 [M]"}, {NULL, NULL}}},
    {NULL, NULL, NULL}};

TE_API const te_op_row test_ops[] = {
    {"encode", "x as rowint8",
     (const te_slot_row[]){{false, "x", "f32 [*M, K]"}, {true, "q", "rowint8 [*M, K]"}, {false, NULL, NULL}},
     encode, NULL},
    {"decode", "q, plus extra if there is one",
     (const te_slot_row[]){{false, "q", "rowint8 [*M, K]"},
                           {false, "extra", "rowint8 [*M, K] ?"},
                           {false, "sign", "int = 1"},
                           {true, "y", "f32 [*M, K]"},
                           {false, NULL, NULL}},
     decode, NULL},
    {NULL, NULL, NULL, NULL, NULL}};

TE_API const te_op_row bad_ops[] = {{"bad", "a row with a mistake",
                                     (const te_slot_row[]){{false, "x", "f32 [*M, K"}, {false, NULL, NULL}},
                                     encode, NULL},
                                    {NULL, NULL, NULL, NULL, NULL}};
