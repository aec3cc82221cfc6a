/* Activations and their derivatives in fp32, shared by CPU and CUDA code. Names are Transformer Engine's. */
#ifndef TE_ACTIVATION_H
#define TE_ACTIVATION_H

#include "te_format.h"
#include "te_matrix.h"

#include <math.h>

/* X(name, function, whether a second half of the row gates the first) */
#define TE_ACTIVATIONS(X) \
  X(gelu, TE_GELU, false) \
  X(geglu, TE_GELU, true) \
  X(glu, TE_SIGMOID, true) \
  X(qgelu, TE_QGELU, false) \
  X(qgeglu, TE_QGELU, true) \
  X(relu, TE_RELU, false) \
  X(reglu, TE_RELU, true) \
  X(srelu, TE_SRELU, false) \
  X(sreglu, TE_SRELU, true) \
  X(silu, TE_SILU, false) \
  X(swiglu, TE_SILU, true) \
  X(clamped_swiglu, TE_CLAMPED_SILU, true)

typedef enum te_activation_function {
  TE_GELU, /* by tanh: Hendrycks and Gimpel 2016 */
  TE_SIGMOID,
  TE_QGELU, /* x sigmoid(1.702 x) */
  TE_RELU,
  TE_SRELU,
  TE_SILU,
  TE_CLAMPED_SILU, /* x sigmoid(alpha x) up to a limit */
} te_activation_function;

typedef struct te_activation {
  te_activation_function function;
  float limit, alpha, offset; /* of TE_CLAMPED_SILU; offset is added to its gate */
} te_activation;

/* A function's value and derivative. */
typedef struct te_slope {
  float value, slope;
} te_slope;

#define TE_NOTHING_BELOW (-100.0f) /* there x sigmoid(x) is less than fp32 holds; farther out, -inf * 0 */

/* x sigmoid(a x) */
TE_HOST_DEVICE te_slope te_swish(float x, float a) {
  te_slope s = {0, 0};
  if (a * x < TE_NOTHING_BELOW) return s;
  float sigmoid = 1.0f / (1.0f + expf(-a * x));
  s.value = x * sigmoid;
  s.slope = sigmoid == 1.0f ? 1.0f : sigmoid + a * s.value * (1.0f - sigmoid);
  return s;
}

/* gelu(x) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), which has tanh's value without its
 * cancellation. */
TE_HOST_DEVICE te_slope te_gelu(float x) {
  float squared = x * x, twice_u = x * (1.5957691216f + 0.0713548162726f * squared);
  te_slope s = {0, 0};
  if (twice_u < TE_NOTHING_BELOW) return s;
  float sigmoid = 1.0f / (1.0f + expf(-twice_u));
  s.value = x * sigmoid;
  s.slope = sigmoid == 1.0f
                ? 1.0f
                : sigmoid + s.value * (1.0f - sigmoid) * (1.5957691216f + 3 * 0.0713548162726f * squared);
  return s;
}

TE_HOST_DEVICE te_slope te_activate(const te_activation *a, float x) {
  te_slope s;
  switch (a->function) {
  case TE_GELU:
    return te_gelu(x);
  case TE_SIGMOID:
    s.value = 1.0f / (1.0f + expf(-x));
    s.slope = s.value * (1.0f - s.value);
    return s;
  case TE_QGELU:
    return te_swish(x, 1.702f);
  case TE_RELU: /* a NaN stays one */
    s.value = x < 0 ? 0.0f : x;
    s.slope = x > 0 ? 1.0f : 0.0f;
    return s;
  case TE_SRELU:
    s.value = x < 0 ? 0.0f : x * x;
    s.slope = x > 0 ? 2.0f * x : 0.0f;
    return s;
  case TE_SILU:
    return te_swish(x, 1.0f);
  default:
    s = te_swish(x > a->limit ? a->limit : x, a->alpha);
    if (x > a->limit) s.slope = 0;
    return s;
  }
}

/* What the second half multiplies with. */
TE_HOST_DEVICE te_slope te_gate(const te_activation *a, float x) {
  te_slope s = {x, 1};
  if (a->function != TE_CLAMPED_SILU) return s;
  s.value = (x > a->limit ? a->limit : x < -a->limit ? -a->limit : x) + a->offset;
  s.slope = x > a->limit || x < -a->limit ? 0.0f : 1.0f;
  return s;
}

/* One pass over contiguous tensors: y from x, or (with dy) dx from dy and x. `cols` are those of y and dy; x
 * and dx have twice as many if `gated`. */
typedef struct te_activation_pass {
  te_activation activation;
  bool gated;
  te_dtype dtype;
  int64_t rows, cols;
  const void *x, *dy; /* dy is NULL in forward */
  void *out;
} te_activation_pass;

int te__activation_cpu(const te_context *ctx, const te_activation_pass *pass);
int te__activation_cuda(const te_context *ctx, const te_activation_pass *pass);

#endif
