/* Per-tensor FP8 scales: the rules, shared by CPU and CUDA code, and the layout of a module's delayed-scaling
 * state. */
#ifndef TE_SCALE_H
#define TE_SCALE_H

#include "te_format.h"

#define TE_FLT_MAX 3.402823466e+38f

TE_HOST_DEVICE float te_fp8_max(te_dtype dtype) { return dtype == TE_e5m2 ? TE_E5M2_MAX : TE_E4M3_MAX; }

TE_HOST_DEVICE bool te_is_finite(float x) { return (te_f32_to_bits(x) & 0x7f800000u) != 0x7f800000u; }

/* fp8_max / amax by one IEEE division; a scale that overflows becomes FLT_MAX. `amax` is positive and finite.
 */
TE_HOST_DEVICE float te_scale_of(float amax, float fp8_max) {
  float scale = fp8_max / amax;
  return te_is_finite(scale) ? scale : TE_FLT_MAX;
}

/* Current scaling: an amax of 0 or infinity gives scale 1; a power of two is reached by rounding down. */
TE_HOST_DEVICE float te_current_scale(float amax, float fp8_max, bool pow2) {
  if (amax == 0 || !te_is_finite(amax)) return 1.0f;
  float scale = te_scale_of(amax, fp8_max);
  return pow2 ? te_bits_to_f32(te_f32_to_bits(scale) & 0xff800000u) : scale;
}

/* -------------------------------------------------------------------------------- delayed scaling ---- */

/* The tensors of a linear layer that have a scale of their own. */
enum { TE_STATE_X, TE_STATE_W, TE_STATE_Y, TE_STATE_DY, TE_STATE_DX, TE_STATE_TENSORS };

/* A module's state is one int32 tensor, so that no conversion of a module's dtype touches it:
 * [0]      the number of the autocast region in which it was last rolled
 * [4..8]   fp32 scales
 * [16..]   fp32 amax history, row-major, TE_STATE_TENSORS columns; row 0 is being staged */
#define TE_STATE_SCALES 4
#define TE_STATE_HISTORY 16
#define TE_STATE_SIZE(history_len) (TE_STATE_HISTORY + TE_STATE_TENSORS * (int64_t)(history_len))

TE_HOST_DEVICE float *te_state_scale(void *state, int tensor) {
  return (float *)state + TE_STATE_SCALES + tensor;
}

TE_HOST_DEVICE float *te_state_amax(void *state, int tensor) {
  return (float *)state + TE_STATE_HISTORY + tensor;
}

/* How the scales of a state follow from its history. */
typedef struct te_delayed {
  int32_t history_len;
  int32_t margin;
  bool most_recent;       /* amax is the newest entry, not the largest */
  bool backward_is_e5m2;  /* the format of dy and dx */
  const float *new_scale; /* TE_STATE_TENSORS scales that a user's function computed, or NULL */
} te_delayed;

TE_HOST_DEVICE float te_delayed_scale(float amax, float previous, float fp8_max, int margin) {
  if (amax == 0 || !te_is_finite(amax)) return previous;
  float scale = fp8_max / amax;
  for (int i = 0; i < margin; i++) scale *= 0.5f;
  for (int i = 0; i > margin; i--) scale *= 2.0f;
  return te_is_finite(scale) ? scale : TE_FLT_MAX;
}

#endif
