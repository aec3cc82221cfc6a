/* Activations and their derivatives in fp32, shared by CPU and CUDA code. Names are Transformer Engine's. */
#ifndef TE_ACTIVATION_H
#define TE_ACTIVATION_H

#include "te_format.h"
#include "te_matrix.h"

#include <float.h>
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

/* Clamps through which a NaN passes. On a GPU one instruction each; fmaxf() and fminf() drop a NaN. */
TE_HOST_DEVICE float te_at_least(float x, float least) {
#if defined(__CUDA_ARCH__)
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(least));
  return x;
#else
  return x < least ? least : x;
#endif
}

TE_HOST_DEVICE float te_at_most(float x, float most) {
#if defined(__CUDA_ARCH__)
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  return x;
#else
  return x > most ? most : x;
#endif
}

/* sigmoid(t) and 1 - sigmoid(t), both without cancellation: a derivative far out is a small product of
 * them. */
typedef struct te_sigmoid {
  float at, complement;
} te_sigmoid;

TE_HOST_DEVICE te_sigmoid te_sigmoid_of(float t) {
  float e = expf(-t); /* infinite far below zero, where `at` is 0 then */
  te_sigmoid s;
#if defined(__CUDA_ARCH__) /* within one unit of the last place; the exact division has a slow path */
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s.at) : "f"(1.0f + e));
#else
  s.at = 1.0f / (1.0f + e);
#endif
  s.complement = t < 0 ? 1.0f - s.at : e * s.at;
  return s;
}

/* x sigmoid(a x). The bounds keep infinities away from factors that are 0 there. */
TE_HOST_DEVICE te_slope te_swish(float x, float a) {
  float t = a * x, finite_t = te_at_most(te_at_least(t, -FLT_MAX), FLT_MAX);
  te_sigmoid sigmoid = te_sigmoid_of(t);
  te_slope s;
  s.value = te_at_least(x, -FLT_MAX) * sigmoid.at;
  s.slope = sigmoid.at * (1.0f + finite_t * sigmoid.complement);
  return s;
}

#define TE_GELU_FLAT 16.0f /* farther out gelu is 0 or x in fp32, and powers of x would overflow */

/* gelu(x) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), which has tanh's value without its
 * cancellation. */
TE_HOST_DEVICE te_slope te_gelu(float x) {
  float from_below = te_at_least(x, -TE_GELU_FLAT), near = te_at_most(from_below, TE_GELU_FLAT);
  float squared = near * near;
  te_sigmoid sigmoid = te_sigmoid_of(near * (1.5957691216f + 0.0713548162726f * squared));
  te_slope s;
  s.value = from_below * sigmoid.at;
  s.slope =
      sigmoid.at * (1.0f + near * sigmoid.complement * (1.5957691216f + 3 * 0.0713548162726f * squared));
  return s;
}

TE_HOST_DEVICE te_slope te_activate(const te_activation *a, float x) {
  te_slope s;
  te_sigmoid sigmoid;
  switch (a->function) {
  case TE_GELU:
    return te_gelu(x);
  case TE_SIGMOID:
    sigmoid = te_sigmoid_of(x);
    s.value = sigmoid.at;
    s.slope = sigmoid.at * sigmoid.complement;
    return s;
  case TE_QGELU:
    return te_swish(x, 1.702f);
  case TE_RELU:
    s.value = te_at_least(x, 0.0f);
    s.slope = x <= 0 ? 0.0f : 1.0f;
    return s;
  case TE_SRELU:
    s.value = te_at_least(x, 0.0f) * te_at_least(x, 0.0f);
    s.slope = 2.0f * te_at_least(x, 0.0f);
    return s;
  case TE_SILU:
    return te_swish(x, 1.0f);
  default: /* at the limit itself the slope is that from below, as in Transformer Engine */
    s = te_swish(te_at_most(x, a->limit), a->alpha);
    if (x > a->limit) s.slope = 0;
    return s;
  }
}

/* What the second half multiplies with. */
TE_HOST_DEVICE te_slope te_gate(const te_activation *a, float x) {
  te_slope s = {x, 1};
  if (a->function != TE_CLAMPED_SILU) return s;
  s.value = te_at_most(te_at_least(x, -a->limit), a->limit) + a->offset;
  s.slope = x > a->limit || x < -a->limit ? 0.0f : 1.0f;
  return s;
}

/* One pass: y from x, or (with dy) dx from dy and x. `cols` are those of y and dy; x and dx have twice as
 * many if `gated`. What is read may be strided, what is written is contiguous. */
typedef struct te_activation_pass {
  te_activation activation;
  bool gated;
  int64_t cols;
  te_matrix x, dy, out; /* dy has no data in forward */
  void *db;             /* the sums over rows of dx as it is stored, in its dtype; or NULL */
} te_activation_pass;

/* The name of the i-th of TE_ACTIVATIONS and whether it is gated; NULL past the last one. */
const char *te__activation_name(int64_t i, bool *gated);

int te__activation_cpu(const te_context *ctx, const te_activation_pass *pass);
int te__activation_cuda(const te_context *ctx, const te_activation_pass *pass);

#endif
