// Ranges of what a user's mask is made of, over all queries and keys of a tile: what the generated text of a mask
// (nvrtc_attn/modifiers/cuda_tiles.py) computes instead of its values, to find tiles that it leaves nothing of.
//
// A range holds every value that the mask's own text computes there, with its int32 arithmetic and its float32 rounding;
// it may be wider. nvrtc_attn/modifiers/intervals.py is the same in NumPy and has the reasons of the numbers.
#pragma once
#include <cute/util/type_traits.hpp>
#include "scores.cuh"

namespace nvrtc_attn {

// Integers, and booleans as 0 and 1.
struct IntRange {
  int lo, hi;
};
// lo is NaN: anything, NaN too.
struct FloatRange {
  float lo, hi;
};

constexpr int kIntMin = -2147483647 - 1;
constexpr int kIntMax = 2147483647;
constexpr float kRangeSlack = 0x1p-15f;
constexpr float kRangeAbsolute = 1e-6f;
constexpr float kRangeTiny = 1e-30f;
constexpr int kMaxBox = 64;  // elements of an array that are looked at for one tile

NVRTC_ATTN_DEVICE IntRange any_int() { return {kIntMin, kIntMax}; }
NVRTC_ATTN_DEVICE IntRange any_bool() { return {0, 1}; }
NVRTC_ATTN_DEVICE FloatRange any_float() { return {not_a_number(), infinity()}; }
NVRTC_ATTN_DEVICE bool is_any(FloatRange a) { return a.lo != a.lo; }
NVRTC_ATTN_DEVICE bool is_finite(FloatRange a) { return fabsf(a.lo) < infinity() && fabsf(a.hi) < infinity(); }

// Of a value that is the same in the whole tile.
NVRTC_ATTN_DEVICE IntRange range_of(int x) { return {x, x}; }
NVRTC_ATTN_DEVICE IntRange range_of(bool x) { return {int(x), int(x)}; }
NVRTC_ATTN_DEVICE FloatRange range_of(float x) { return x == x ? FloatRange{x, x} : any_float(); }

// Of two tiles, or values.
NVRTC_ATTN_DEVICE IntRange joined(IntRange a, IntRange b) { return {min(a.lo, b.lo), max(a.hi, b.hi)}; }
NVRTC_ATTN_DEVICE FloatRange joined(FloatRange a, FloatRange b) {
  if (is_any(a) || is_any(b)) return any_float();
  return {fminf(a.lo, b.lo), fmaxf(a.hi, b.hi)};
}

NVRTC_ATTN_DEVICE IntRange fitted(long long lo, long long hi) {
  return lo < kIntMin || hi > kIntMax ? any_int() : IntRange{int(lo), int(hi)};
}
// With room for rounding.
NVRTC_ATTN_DEVICE FloatRange widened(float lo, float hi, float more = 0.0f) {
  lo = lo - fabsf(lo) * kRangeSlack - more;
  hi = hi + fabsf(hi) * kRangeSlack + more;
  if (lo > 0.0f && lo < kRangeTiny) lo = 0.0f;
  if (hi < 0.0f && hi > -kRangeTiny) hi = 0.0f;
  return lo != lo || hi != hi ? any_float() : FloatRange{lo, hi};
}

// -- Integers.

NVRTC_ATTN_DEVICE IntRange range_add(IntRange a, IntRange b) {
  return fitted((long long)a.lo + b.lo, (long long)a.hi + b.hi);
}
NVRTC_ATTN_DEVICE IntRange range_sub(IntRange a, IntRange b) {
  return fitted((long long)a.lo - b.hi, (long long)a.hi - b.lo);
}
NVRTC_ATTN_DEVICE IntRange range_mul(IntRange a, IntRange b) {
  long long const x[4] = {(long long)a.lo * b.lo, (long long)a.lo * b.hi, (long long)a.hi * b.lo,
                          (long long)a.hi * b.hi};
  return fitted(min(min(x[0], x[1]), min(x[2], x[3])), max(max(x[0], x[1]), max(x[2], x[3])));
}
NVRTC_ATTN_DEVICE IntRange range_square(IntRange a) {
  long long const x = (long long)a.lo * a.lo;
  long long const y = (long long)a.hi * a.hi;
  return fitted(a.lo <= 0 && a.hi >= 0 ? 0 : min(x, y), max(x, y));
}
NVRTC_ATTN_DEVICE IntRange range_floordiv(IntRange a, IntRange b) {
  if (b.lo <= 0 && b.hi >= 0) return any_int();
  if (a.lo == kIntMin && b.hi == -1) return any_int();
  int const w = floor_div(a.lo, b.lo), x = floor_div(a.lo, b.hi), y = floor_div(a.hi, b.lo), z = floor_div(a.hi, b.hi);
  return {min(min(w, x), min(y, z)), max(max(w, x), max(y, z))};
}
NVRTC_ATTN_DEVICE IntRange range_mod(IntRange a, IntRange b) {
  if (b.lo <= 0 && b.hi >= 0) return any_int();
  if (b.lo == b.hi && b.lo != -1 && floor_div(a.lo, b.lo) == floor_div(a.hi, b.lo)) {
    return {floor_mod(a.lo, b.lo), floor_mod(a.hi, b.lo)};
  }
  return b.lo > 0 ? IntRange{0, b.hi - 1} : IntRange{b.lo + 1, 0};
}
NVRTC_ATTN_DEVICE IntRange range_neg(IntRange a) { return fitted(-(long long)a.hi, -(long long)a.lo); }
NVRTC_ATTN_DEVICE IntRange range_abs(IntRange a) {
  long long const x = a.lo < 0 ? -(long long)a.lo : a.lo;
  long long const y = a.hi < 0 ? -(long long)a.hi : a.hi;
  return fitted(a.lo <= 0 && a.hi >= 0 ? 0 : min(x, y), max(x, y));
}
NVRTC_ATTN_DEVICE IntRange range_sign(IntRange a) { return {sign_of(a.lo), sign_of(a.hi)}; }
NVRTC_ATTN_DEVICE IntRange range_minimum(IntRange a, IntRange b) { return {min(a.lo, b.lo), min(a.hi, b.hi)}; }
NVRTC_ATTN_DEVICE IntRange range_maximum(IntRange a, IntRange b) { return {max(a.lo, b.lo), max(a.hi, b.hi)}; }
NVRTC_ATTN_DEVICE IntRange range_not(IntRange a) { return {~a.hi, ~a.lo}; }
NVRTC_ATTN_DEVICE bool are_points(IntRange a, IntRange b) { return a.lo == a.hi && b.lo == b.hi; }
NVRTC_ATTN_DEVICE IntRange range_and(IntRange a, IntRange b) {
  if (are_points(a, b)) return range_of(a.lo & b.lo);
  for (int i = 0; i < 2; ++i) {  // 2^n - 1: a remainder
    IntRange const x = i == 0 ? a : b;
    IntRange const y = i == 0 ? b : a;
    if (y.lo == y.hi && y.lo >= 0 && (y.lo & (y.lo + 1)) == 0 && (x.lo & ~y.lo) == (x.hi & ~y.lo)) {
      return {x.lo & y.lo, x.hi & y.lo};
    }
  }
  if (a.lo < 0 && b.lo < 0) return any_int();
  return {0, min(a.lo >= 0 ? a.hi : kIntMax, b.lo >= 0 ? b.hi : kIntMax)};
}
// Of `or` and `xor`: no bit above those of both.
NVRTC_ATTN_DEVICE IntRange below_power_of_two(IntRange a, IntRange b) {
  if (a.lo < 0 || b.lo < 0) return any_int();
  int most = max(a.hi, b.hi);
  for (int shift = 1; shift < 32; shift *= 2) most |= most >> shift;
  return {0, most};
}
NVRTC_ATTN_DEVICE IntRange range_or(IntRange a, IntRange b) {
  return are_points(a, b) ? range_of(a.lo | b.lo) : below_power_of_two(a, b);
}
NVRTC_ATTN_DEVICE IntRange range_xor(IntRange a, IntRange b) {
  return are_points(a, b) ? range_of(a.lo ^ b.lo) : below_power_of_two(a, b);
}
NVRTC_ATTN_DEVICE IntRange range_shl(IntRange a, IntRange b) {
  if (b.lo < 0 || b.hi > 30) return any_int();
  return range_mul(a, {1 << b.lo, 1 << b.hi});
}
NVRTC_ATTN_DEVICE IntRange range_shr(IntRange a, IntRange b) {
  if (b.lo < 0 || b.hi > 31) return any_int();
  return {min(a.lo >> b.lo, a.lo >> b.hi), max(a.hi >> b.lo, a.hi >> b.hi)};
}

// -- Floating-point numbers. What is infinite at an end may be so: no arithmetic with it.

NVRTC_ATTN_DEVICE FloatRange range_add(FloatRange a, FloatRange b) {
  return is_finite(a) && is_finite(b) ? widened(a.lo + b.lo, a.hi + b.hi) : any_float();
}
NVRTC_ATTN_DEVICE FloatRange range_sub(FloatRange a, FloatRange b) {
  return is_finite(a) && is_finite(b) ? widened(a.lo - b.hi, a.hi - b.lo) : any_float();
}
// Bounds of what a function that grows or falls with each operand makes of its corners.
NVRTC_ATTN_DEVICE FloatRange of_corners(float w, float x, float y, float z) {
  return widened(fminf(fminf(w, x), fminf(y, z)), fmaxf(fmaxf(w, x), fmaxf(y, z)));
}
NVRTC_ATTN_DEVICE FloatRange range_mul(FloatRange a, FloatRange b) {
  if (!is_finite(a) || !is_finite(b)) return any_float();
  return of_corners(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi);
}
NVRTC_ATTN_DEVICE FloatRange range_square(FloatRange a) {
  if (!is_finite(a)) return any_float();
  float const x = a.lo * a.lo;
  float const y = a.hi * a.hi;
  return widened(a.lo <= 0.0f && a.hi >= 0.0f ? 0.0f : fminf(x, y), fmaxf(x, y));
}
NVRTC_ATTN_DEVICE FloatRange range_div(FloatRange a, FloatRange b) {
  if (!is_finite(a) || !is_finite(b) || !(b.lo > 0.0f || b.hi < 0.0f)) return any_float();
  return of_corners(a.lo / b.lo, a.lo / b.hi, a.hi / b.lo, a.hi / b.hi);
}
NVRTC_ATTN_DEVICE FloatRange range_floor(FloatRange a) { return {floorf(a.lo), floorf(a.hi)}; }
NVRTC_ATTN_DEVICE FloatRange range_ceil(FloatRange a) { return {ceilf(a.lo), ceilf(a.hi)}; }
NVRTC_ATTN_DEVICE FloatRange range_round(FloatRange a) { return {rintf(a.lo), rintf(a.hi)}; }
NVRTC_ATTN_DEVICE FloatRange range_trunc(FloatRange a) { return {truncf(a.lo), truncf(a.hi)}; }
NVRTC_ATTN_DEVICE FloatRange range_floordiv(FloatRange a, FloatRange b) {
  FloatRange const found = range_floor(range_div(a, b));
  return widened(found.lo, found.hi);
}
NVRTC_ATTN_DEVICE FloatRange range_mod(FloatRange a, FloatRange b) {
  if (!is_finite(a) || !is_finite(b) || !(b.lo > 0.0f || b.hi < 0.0f)) return any_float();
  float const error = fmaxf(fabsf(a.lo), fabsf(a.hi)) * kRangeSlack + kRangeAbsolute;  // a - floor(a / b) * b
  return widened(fminf(b.lo, 0.0f) - error, fmaxf(b.hi, 0.0f) + error);
}
NVRTC_ATTN_DEVICE FloatRange range_pow(FloatRange a, FloatRange b) {
  if (!is_finite(a) || !is_finite(b) || !(a.lo > 0.0f)) return any_float();
  FloatRange const found = of_corners(powf(a.lo, b.lo), powf(a.lo, b.hi), powf(a.hi, b.lo), powf(a.hi, b.hi));
  return widened(found.lo, found.hi);
}
NVRTC_ATTN_DEVICE FloatRange range_neg(FloatRange a) { return is_any(a) ? a : FloatRange{-a.hi, -a.lo}; }
NVRTC_ATTN_DEVICE FloatRange range_abs(FloatRange a) {
  if (is_any(a)) return a;
  float const x = fabsf(a.lo);
  float const y = fabsf(a.hi);
  return {a.lo <= 0.0f && a.hi >= 0.0f ? 0.0f : fminf(x, y), fmaxf(x, y)};
}
NVRTC_ATTN_DEVICE FloatRange range_sign(FloatRange a) {
  return is_any(a) ? FloatRange{-1.0f, 1.0f} : FloatRange{sign_of(a.lo), sign_of(a.hi)};
}
NVRTC_ATTN_DEVICE FloatRange range_minimum(FloatRange a, FloatRange b) {
  return is_any(a) || is_any(b) ? any_float() : FloatRange{fminf(a.lo, b.lo), fminf(a.hi, b.hi)};
}
NVRTC_ATTN_DEVICE FloatRange range_maximum(FloatRange a, FloatRange b) {
  return is_any(a) || is_any(b) ? any_float() : FloatRange{fmaxf(a.lo, b.lo), fmaxf(a.hi, b.hi)};
}
NVRTC_ATTN_DEVICE FloatRange range_exp(FloatRange a) { return is_any(a) ? a : widened(expf(a.lo), expf(a.hi)); }
NVRTC_ATTN_DEVICE FloatRange range_exp2(FloatRange a) { return is_any(a) ? a : widened(exp2f(a.lo), exp2f(a.hi)); }
NVRTC_ATTN_DEVICE FloatRange range_expm1(FloatRange a) {
  return is_any(a) ? a : widened(expm1f(a.lo), expm1f(a.hi), kRangeAbsolute);
}
NVRTC_ATTN_DEVICE FloatRange range_log(FloatRange a) {
  return a.lo > 0.0f ? widened(logf(a.lo), logf(a.hi), kRangeAbsolute) : any_float();
}
NVRTC_ATTN_DEVICE FloatRange range_log2(FloatRange a) {
  return a.lo > 0.0f ? widened(log2f(a.lo), log2f(a.hi), kRangeAbsolute) : any_float();
}
NVRTC_ATTN_DEVICE FloatRange range_log1p(FloatRange a) {
  return a.lo > -1.0f ? widened(log1pf(a.lo), log1pf(a.hi), kRangeAbsolute) : any_float();
}
NVRTC_ATTN_DEVICE FloatRange range_sqrt(FloatRange a) {
  return a.lo >= 0.0f ? widened(sqrtf(a.lo), sqrtf(a.hi)) : any_float();
}
NVRTC_ATTN_DEVICE FloatRange range_rsqrt(FloatRange a) {
  return a.lo > 0.0f ? widened(rsqrtf(a.hi), rsqrtf(a.lo)) : any_float();
}
NVRTC_ATTN_DEVICE FloatRange range_tanh(FloatRange a) {
  return is_any(a) ? a : widened(tanhf(a.lo), tanhf(a.hi), kRangeAbsolute);
}
NVRTC_ATTN_DEVICE FloatRange range_sigmoid(FloatRange a) {
  return is_any(a) ? a : widened(1.0f / (1.0f + expf(-a.lo)), 1.0f / (1.0f + expf(-a.hi)));
}
NVRTC_ATTN_DEVICE FloatRange range_erf(FloatRange a) {
  return is_any(a) ? a : widened(erff(a.lo), erff(a.hi), kRangeAbsolute);
}
NVRTC_ATTN_DEVICE FloatRange range_sin(FloatRange a) {
  return is_finite(a) ? widened(-1.0f, 1.0f, kRangeAbsolute) : any_float();
}
NVRTC_ATTN_DEVICE FloatRange range_cos(FloatRange a) { return range_sin(a); }

// -- Conversions.

NVRTC_ATTN_DEVICE FloatRange range_float(IntRange a) { return {float(a.lo), float(a.hi)}; }  // rounding keeps the order
NVRTC_ATTN_DEVICE IntRange range_int(FloatRange a) {
  if (!(a.lo > -2147483520.0f && a.hi < 2147483520.0f)) return any_int();
  return {int(a.lo), int(a.hi)};
}
NVRTC_ATTN_DEVICE IntRange range_int(IntRange a) { return a; }
NVRTC_ATTN_DEVICE IntRange range_bool(IntRange a) { return {a.lo > 0 || a.hi < 0, a.lo != 0 || a.hi != 0}; }
NVRTC_ATTN_DEVICE IntRange range_bool(FloatRange a) {
  if (is_any(a)) return any_bool();
  return {a.lo > 0.0f || a.hi < 0.0f, a.lo != 0.0f || a.hi != 0.0f};
}

// -- Conditions.

template <class Range>
NVRTC_ATTN_DEVICE IntRange range_lt(Range a, Range b) {
  return {a.hi < b.lo, !(a.lo >= b.hi)};  // NaN: neither
}
template <class Range>
NVRTC_ATTN_DEVICE IntRange range_le(Range a, Range b) {
  return {a.hi <= b.lo, !(a.lo > b.hi)};
}
NVRTC_ATTN_DEVICE IntRange range_lt(FloatRange a, FloatRange b) {
  return is_any(a) || is_any(b) ? any_bool() : IntRange{a.hi < b.lo, !(a.lo >= b.hi)};
}
NVRTC_ATTN_DEVICE IntRange range_le(FloatRange a, FloatRange b) {
  return is_any(a) || is_any(b) ? any_bool() : IntRange{a.hi <= b.lo, !(a.lo > b.hi)};
}
template <class Range>
NVRTC_ATTN_DEVICE IntRange range_gt(Range a, Range b) {
  return range_lt(b, a);
}
template <class Range>
NVRTC_ATTN_DEVICE IntRange range_ge(Range a, Range b) {
  return range_le(b, a);
}
NVRTC_ATTN_DEVICE IntRange range_eq(IntRange a, IntRange b) {
  return {are_points(a, b) && a.lo == b.lo, !(a.hi < b.lo || b.hi < a.lo)};
}
NVRTC_ATTN_DEVICE IntRange range_eq(FloatRange a, FloatRange b) {
  if (is_any(a) || is_any(b)) return any_bool();
  return {a.lo == a.hi && b.lo == b.hi && a.lo == b.lo && is_finite(a), !(a.hi < b.lo || b.hi < a.lo)};
}
NVRTC_ATTN_DEVICE IntRange not_so(IntRange a) { return {1 - a.hi, 1 - a.lo}; }
template <class Range>
NVRTC_ATTN_DEVICE IntRange range_ne(Range a, Range b) {
  return not_so(range_eq(a, b));
}
NVRTC_ATTN_DEVICE IntRange both_of(IntRange a, IntRange b) { return {a.lo & b.lo, a.hi & b.hi}; }
NVRTC_ATTN_DEVICE IntRange either_of(IntRange a, IntRange b) { return {a.lo | b.lo, a.hi | b.hi}; }
NVRTC_ATTN_DEVICE IntRange one_of(IntRange a, IntRange b) {
  return are_points(a, b) ? range_of(a.lo ^ b.lo) : any_bool();
}
template <class Range>
NVRTC_ATTN_DEVICE Range range_where(IntRange condition, Range a, Range b) {
  return condition.lo > 0 ? a : condition.hi > 0 ? joined(a, b) : b;
}

// An element of an array whose index is somewhere in a box: of a few elements all of them are looked at.
template <class Range, int kRank, class Element>
NVRTC_ATTN_DEVICE Range range_in_box(Range unknown, IntRange const (&index)[kRank], Element&& element) {
  long long count = 1;
  int at[kRank];
#pragma unroll
  for (int axis = 0; axis < kRank; ++axis) {
    if (count <= kMaxBox) count *= (long long)index[axis].hi - index[axis].lo + 1;
    at[axis] = index[axis].lo;
  }
  if (count > kMaxBox) return unknown;
  Range found = range_of(element(at));
#pragma unroll 1
  for (int i = 1; i < int(count); ++i) {
#pragma unroll
    for (int axis = kRank - 1; axis >= 0; --axis) {
      if (at[axis] < index[axis].hi) {
        ++at[axis];
        break;
      }
      at[axis] = index[axis].lo;
    }
    found = joined(found, range_of(element(at)));
  }
  return found;
}

// Over the lanes of a warp.
NVRTC_ATTN_DEVICE IntRange of_lane(IntRange a, int lane) {
  return {__shfl_xor_sync(0xffffffffu, a.lo, lane), __shfl_xor_sync(0xffffffffu, a.hi, lane)};
}
NVRTC_ATTN_DEVICE FloatRange of_lane(FloatRange a, int lane) {
  return {__shfl_xor_sync(0xffffffffu, a.lo, lane), __shfl_xor_sync(0xffffffffu, a.hi, lane)};
}

// What joins with a range without changing it.
NVRTC_ATTN_DEVICE void make_nothing(IntRange& a) { a = {kIntMax, kIntMin}; }
NVRTC_ATTN_DEVICE void make_nothing(FloatRange& a) { a = {infinity(), -infinity()}; }

}  // namespace nvrtc_attn
