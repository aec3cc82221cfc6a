/* Activations of several elements at once, in fp32: what the kernels with and without a cast share. */
#ifndef TE_ACTIVATION_DEVICE_CUH
#define TE_ACTIVATION_DEVICE_CUH

#include "../te_activation.h"

/* Calls act(a) with a copy of `a` whose function is a constant. All threads take the same branch, once for
 * many elements, so a kernel is compiled once and not for each function. */
template <typename ACT> __device__ __forceinline__ void by_function(te_activation a, const ACT &act) {
  switch (a.function) {
#define TE_CASE(f) \
  case f: \
    a.function = f; \
    act(a); \
    break;
    TE_CASE(TE_GELU)
    TE_CASE(TE_SIGMOID)
    TE_CASE(TE_QGELU)
    TE_CASE(TE_RELU)
    TE_CASE(TE_SRELU)
    TE_CASE(TE_SILU)
    TE_CASE(TE_CLAMPED_SILU)
#undef TE_CASE
  }
}

/* y = f(x), or f(x) g. */
template <bool GATED, int N>
__device__ __forceinline__ void activate(const te_activation &kind, const float (&x)[N], const float (&g)[N],
                                         float (&y)[N]) {
  by_function(kind, [&](const te_activation &a) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      float f = te_activate(&a, x[i]).value;
      y[i] = GATED ? f * te_gate(&a, g[i]).value : f;
    }
  });
}

/* x becomes dx, and g dg. */
template <bool GATED, int N>
__device__ __forceinline__ void activate_grads(const te_activation &kind, const float (&dy)[N], float (&x)[N],
                                               float (&g)[N]) {
  by_function(kind, [&](const te_activation &a) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      te_slope f = te_activate(&a, x[i]), gate = {1, 0};
      if (GATED) gate = te_gate(&a, g[i]);
      x[i] = GATED ? dy[i] * gate.value * f.slope : dy[i] * f.slope;
      if (GATED) g[i] = dy[i] * f.value * gate.slope;
    }
  });
}

#endif
