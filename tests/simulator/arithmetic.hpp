// Instructions that read and write registers only. A register of 16 bits or fewer lies in a 32-bit cell.
namespace simulator {

inline float from_bits(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t to_bits(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float from_bf16(uint32_t x) { return from_bits(x << 16); }
inline uint32_t to_bf16(float x) {
  if (x != x) return 0x7fff;
  uint32_t const bits = to_bits(x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float from_f16(uint32_t x) {
  _Float16 y;
  uint16_t const bits = uint16_t(x);
  std::memcpy(&y, &bits, 2);
  return float(y);
}
inline uint32_t to_f16(float x) {
  if (x != x) return 0x7fff;
  _Float16 const y = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

template <class T>
struct Cell {  // how a T lies in a register
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  static T get(Word x) {
    T y;
    std::memcpy(&y, &x, sizeof(T));
    return y;
  }
  static Word put(T x) {
    Word y = 0;
    std::memcpy(&y, &x, sizeof(T));
    return y;
  }
};

template <class D, class A, class F>
inline Result map1(Warp& w, Instr const& i, uint32_t lanes, F f) {
  auto* d = w.reg<typename Cell<D>::Word>(i.x[0]);
  auto const* a = w.reg<typename Cell<A>::Word>(i.x[1]);
  if (lanes == kAll) {
    for (int l = 0; l < kLanes; ++l) d[l] = Cell<D>::put(D(f(Cell<A>::get(a[l]))));
  } else {
    each(lanes, [&](int l) { d[l] = Cell<D>::put(D(f(Cell<A>::get(a[l])))); });
  }
  return kNext;
}
template <class D, class A, class B, class F>
inline Result map2(Warp& w, Instr const& i, uint32_t lanes, F f) {
  auto* d = w.reg<typename Cell<D>::Word>(i.x[0]);
  auto const* a = w.reg<typename Cell<A>::Word>(i.x[1]);
  auto const* b = w.reg<typename Cell<B>::Word>(i.x[2]);
  if (lanes == kAll) {
    for (int l = 0; l < kLanes; ++l) d[l] = Cell<D>::put(D(f(Cell<A>::get(a[l]), Cell<B>::get(b[l]))));
  } else {
    each(lanes, [&](int l) { d[l] = Cell<D>::put(D(f(Cell<A>::get(a[l]), Cell<B>::get(b[l])))); });
  }
  return kNext;
}
template <class D, class A, class B, class C, class F>
inline Result map3(Warp& w, Instr const& i, uint32_t lanes, F f) {
  auto* d = w.reg<typename Cell<D>::Word>(i.x[0]);
  auto const* a = w.reg<typename Cell<A>::Word>(i.x[1]);
  auto const* b = w.reg<typename Cell<B>::Word>(i.x[2]);
  auto const* c = w.reg<typename Cell<C>::Word>(i.x[3]);
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) d[l] = Cell<D>::put(D(f(Cell<A>::get(a[l]), Cell<B>::get(b[l]), Cell<C>::get(c[l]))));
  }
  return kNext;
}
template <class A, class F>
inline Result compare(Warp& w, Instr const& i, uint32_t lanes, F f) {
  auto const* a = w.reg<typename Cell<A>::Word>(i.x[1]);
  auto const* b = w.reg<typename Cell<A>::Word>(i.x[2]);
  uint32_t found = 0;
  for (int l = 0; l < kLanes; ++l) found |= uint32_t(bool(f(Cell<A>::get(a[l]), Cell<A>::get(b[l])))) << l;
  uint32_t& d = w.predicates[size_t(i.x[0])];
  d = (d & ~lanes) | (found & lanes);
  return kNext;
}

using s16 = int16_t;
using u16 = uint16_t;
using s32 = int32_t;
using u32 = uint32_t;
using s64 = int64_t;
using u64 = uint64_t;
using f32 = float;
using f64 = double;

#define UNARY(NAME, D, A, EXPRESSION) OP(NAME, BODY { return map1<D, A>(w, i, lanes, [](A a) { return EXPRESSION; }); })
#define BINARY(NAME, D, A, B, EXPRESSION) \
  OP(NAME, BODY { return map2<D, A, B>(w, i, lanes, [](A a, B b) { return EXPRESSION; }); })
#define TERNARY(NAME, D, A, B, C, EXPRESSION) \
  OP(NAME, BODY { return map3<D, A, B, C>(w, i, lanes, [](A a, B b, C c) { return EXPRESSION; }); })
#define COMPARE(NAME, T, EXPRESSION) \
  OP(NAME, BODY { return compare<T>(w, i, lanes, [](T a, T b) { return EXPRESSION; }); })

// ----------------------------------------------------------------------------------------------------------- integers
#define FOR_INTEGERS(M) M(s16, u16) M(u16, u16) M(s32, u32) M(u32, u32) M(s64, u64) M(u64, u64)
#define INTEGER_OPS(T, U)                                                                             \
  BINARY("add." #T, T, T, T, T(U(a) + U(b)));                                                         \
  BINARY("sub." #T, T, T, T, T(U(a) - U(b)));                                                         \
  BINARY("mul.lo." #T, T, T, T, T(u64(a) * u64(b)));                                                  \
  BINARY("min." #T, T, T, T, std::min(a, b));                                                         \
  BINARY("max." #T, T, T, T, std::max(a, b));                                                         \
  BINARY("div." #T, T, T, T, (b == 0 ? T(-1) : b == T(-1) && T(-1) < 0 ? T(U(0) - U(a)) : T(a / b))); \
  BINARY("rem." #T, T, T, T, (b == 0 ? a : b == T(-1) && T(-1) < 0 ? T(0) : T(a % b)));               \
  BINARY("shr." #T, T, T, u32, (b >= 8 * sizeof(T) ? (a < 0 ? T(-1) : T(0)) : T(a >> b)));            \
  UNARY("neg." #T, T, T, T(U(0) - U(a)));                                                             \
  UNARY("abs." #T, T, T, a < 0 ? T(U(0) - U(a)) : a);                                                 \
  TERNARY("mad.lo." #T, T, T, T, T, T(u64(a) * u64(b) + u64(c)));                                     \
  COMPARE("setp.eq." #T, T, a == b);                                                                  \
  COMPARE("setp.ne." #T, T, a != b);                                                                  \
  COMPARE("setp.lt." #T, T, a < b);                                                                   \
  COMPARE("setp.le." #T, T, a <= b);                                                                  \
  COMPARE("setp.gt." #T, T, a > b);                                                                   \
  COMPARE("setp.ge." #T, T, a >= b);
FOR_INTEGERS(INTEGER_OPS)

BINARY("mul.wide.s16", s32, s16, s16, s32(a) * s32(b));
BINARY("mul.wide.u16", u32, u16, u16, u32(a) * u32(b));
BINARY("mul.wide.s32", s64, s32, s32, s64(a) * s64(b));
BINARY("mul.wide.u32", u64, u32, u32, u64(a) * u64(b));
TERNARY("mad.wide.s32", s64, s32, s32, s64, s64(u64(s64(a) * s64(b)) + u64(c)));
TERNARY("mad.wide.u32", u64, u32, u32, u64, u64(a) * u64(b) + c);
BINARY("mul.hi.s32", s32, s32, s32, s32((s64(a) * s64(b)) >> 32));
BINARY("mul.hi.u32", u32, u32, u32, u32((u64(a) * u64(b)) >> 32));
BINARY("mul.hi.u64", u64, u64, u64, u64((static_cast<unsigned __int128>(a) * b) >> 64));
BINARY("mul.hi.s64", s64, s64, s64, s64((static_cast<__int128>(a) * b) >> 64));

// Sums of several words: d, a, b, and the carry of before if there is one; the carry goes to the next.
inline Result with_carry(Warp& w, Instr const& i, uint32_t lanes, bool takes, bool gives, bool minus) {
  each(lanes, [&](int l) {
    u64 const a = w.reg<u32>(i.x[1])[l], b = w.reg<u32>(i.x[2])[l], c = takes ? w.carry >> l & 1 : 0;
    u64 const d = minus ? a - b - c : a + b + c;
    w.reg<u32>(i.x[0])[l] = u32(d);
    if (gives) w.carry = (w.carry & ~(1u << l)) | u32(d >> 32 & 1) << l;
  });
  return kNext;
}
OP("add.cc.u32", BODY { return with_carry(w, i, lanes, false, true, false); });
OP("addc.u32", BODY { return with_carry(w, i, lanes, true, false, false); });
OP("addc.cc.u32", BODY { return with_carry(w, i, lanes, true, true, false); });
OP("sub.cc.u32", BODY { return with_carry(w, i, lanes, false, true, true); });
OP("subc.u32", BODY { return with_carry(w, i, lanes, true, false, true); });
OP("subc.cc.u32", BODY { return with_carry(w, i, lanes, true, true, true); });

#define BITS(T, N)                                            \
  BINARY("and.b" #N, T, T, T, T(a& b));                       \
  BINARY("or.b" #N, T, T, T, T(a | b));                       \
  BINARY("xor.b" #N, T, T, T, T(a ^ b));                      \
  UNARY("not.b" #N, T, T, T(~a));                             \
  BINARY("shl.b" #N, T, T, u32, (b >= N ? T(0) : T(a << b))); \
  BINARY("shr.b" #N, T, T, u32, (b >= N ? T(0) : T(a >> b))); \
  UNARY("mov.b" #N, T, T, a);                                 \
  COMPARE("setp.eq.b" #N, T, a == b);                         \
  COMPARE("setp.ne.b" #N, T, a != b);
BITS(u16, 16)
BITS(u32, 32)
BITS(u64, 64)

inline u32 reversed(u32 x) {
  u32 y = 0;
  for (int bit = 0; bit < 32; ++bit) y |= (x >> bit & 1) << (31 - bit);
  return y;
}
inline u32 highest(u32 x) { return x ? 31 - u32(__builtin_clz(x)) : kAll; }
UNARY("popc.b32", u32, u32, u32(__builtin_popcount(a)));
UNARY("popc.b64", u32, u64, u32(__builtin_popcountll(a)));
UNARY("clz.b32", u32, u32, a ? u32(__builtin_clz(a)) : 32u);
UNARY("clz.b64", u32, u64, a ? u32(__builtin_clzll(a)) : 64u);
UNARY("brev.b32", u32, u32, reversed(a));
UNARY("bfind.u32", u32, u32, highest(a));
UNARY("bfind.s32", u32, s32, highest(u32(a < 0 ? ~a : a)));
UNARY("bfind.shiftamt.u32", u32, u32, a ? 31 - highest(a) : kAll);

inline u64 extract(u64 a, u32 at, u32 count, u32 size, bool sign) {
  at &= 255;
  count &= 255;
  if (count == 0) return 0;
  u64 const shifted = at >= size ? 0 : a >> at;
  u64 const kept = count >= 64 ? shifted : shifted & ((1ull << count) - 1);
  if (!sign || count >= size) return kept;
  u32 const top = std::min(at + count - 1, size - 1);
  return a >> top & 1 ? kept | ~((1ull << count) - 1) : kept;
}
TERNARY("bfe.u32", u32, u32, u32, u32, u32(extract(a, b, c, 32, false)));
TERNARY("bfe.s32", u32, u32, u32, u32, u32(extract(a, b, c, 32, true)));
TERNARY("bfe.u64", u64, u64, u32, u32, extract(a, b, c, 64, false));
TERNARY("bfe.s64", u64, u64, u32, u32, extract(a, b, c, 64, true));
template <class T>
inline Result inserted(Warp& w, Instr const& i, uint32_t lanes) {
  constexpr u32 kBits = 8 * sizeof(T);
  each(lanes, [&](int l) {
    T const a = w.reg<T>(i.x[1])[l], b = w.reg<T>(i.x[2])[l];
    u32 const at = w.reg<u32>(i.x[3])[l] & 255, count = w.reg<u32>(i.x[4])[l] & 255;
    T const mask = at >= kBits || !count ? 0 : (count >= kBits ? T(~T(0)) : (T(1) << count) - 1) << at;
    w.reg<T>(i.x[0])[l] = (b & ~mask) | ((at >= kBits ? 0 : a << at) & mask);
  });
  return kNext;
}
OP("bfi.b32", BODY { return inserted<u32>(w, i, lanes); });
OP("bfi.b64", BODY { return inserted<u64>(w, i, lanes); });
inline u32 permuted(u32 a, u32 b, u32 selector) {
  u64 const bytes = u64(b) << 32 | a;
  u32 d = 0;
  for (int n = 0; n < 4; ++n) {
    u32 const which = selector >> (4 * n) & 15, byte = u32(bytes >> (8 * (which & 7))) & 255;
    d |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * n);
  }
  return d;
}
TERNARY("prmt.b32", u32, u32, u32, u32, permuted(a, b, c));
TERNARY("shf.l.wrap.b32", u32, u32, u32, u32, u32((u64(b) << 32 | a) << (c & 31) >> 32));
TERNARY("shf.r.wrap.b32", u32, u32, u32, u32, u32((u64(b) << 32 | a) >> (c & 31)));
TERNARY("shf.l.clamp.b32", u32, u32, u32, u32, c >= 32 ? a : u32((u64(b) << 32 | a) << c >> 32));
TERNARY("shf.r.clamp.b32", u32, u32, u32, u32, c >= 32 ? b : u32((u64(b) << 32 | a) >> c));
OP(
    "lop3.b32", BODY {
      u32 const truth = w.reg<u32>(i.x[4])[0];
      each(lanes, [&](int l) {
        u32 const a = w.reg<u32>(i.x[1])[l], b = w.reg<u32>(i.x[2])[l], c = w.reg<u32>(i.x[3])[l];
        u32 d = 0;
        for (int n = 0; n < 8; ++n) {
          if (truth >> n & 1) d |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
        }
        w.reg<u32>(i.x[0])[l] = d;
      });
      return kNext;
    });

// ------------------------------------------------------------------------------------------------------------ floats
BINARY("add.f32", f32, f32, f32, a + b);
BINARY("sub.f32", f32, f32, f32, a - b);
BINARY("mul.f32", f32, f32, f32, a* b);
BINARY("div.f32", f32, f32, f32, a / b);
BINARY("min.f32", f32, f32, f32, a != a ? b : b != b ? a : std::min(a, b));
BINARY("max.f32", f32, f32, f32, a != a ? b : b != b ? a : std::max(a, b));
BINARY("min.NaN.f32", f32, f32, f32, a != a ? a : b != b ? b : std::min(a, b));
BINARY("max.NaN.f32", f32, f32, f32, a != a ? a : b != b ? b : std::max(a, b));
BINARY("copysign.f32", f32, f32, f32, std::copysign(b, a));
TERNARY("fma.f32", f32, f32, f32, f32, __builtin_fmaf(a, b, c));
UNARY("neg.f32", f32, f32, -a);
UNARY("abs.f32", f32, f32, std::fabs(a));
UNARY("rcp.f32", f32, f32, 1.0f / a);
UNARY("sqrt.f32", f32, f32, std::sqrt(a));
UNARY("rsqrt.f32", f32, f32, 1.0f / std::sqrt(a));
UNARY("ex2.f32", f32, f32, std::exp2(a));
UNARY("ex2.ftz.f32", f32, f32, flushed(std::exp2(flushed(a))));
UNARY("lg2.f32", f32, f32, std::log2(a));
UNARY("sin.f32", f32, f32, std::sin(a));
UNARY("cos.f32", f32, f32, std::cos(a));
UNARY("tanh.f32", f32, f32, std::tanh(a));
UNARY("mov.f32", u32, u32, a);
UNARY("mov.f64", u64, u64, a);
BINARY("add.f64", f64, f64, f64, a + b);
BINARY("sub.f64", f64, f64, f64, a - b);
BINARY("mul.f64", f64, f64, f64, a* b);
BINARY("div.f64", f64, f64, f64, a / b);
BINARY("min.f64", f64, f64, f64, a != a ? b : b != b ? a : std::min(a, b));
BINARY("max.f64", f64, f64, f64, a != a ? b : b != b ? a : std::max(a, b));
TERNARY("fma.f64", f64, f64, f64, f64, __builtin_fma(a, b, c));
UNARY("neg.f64", f64, f64, -a);
UNARY("abs.f64", f64, f64, std::fabs(a));
#define FLOAT_COMPARES(T)                                \
  COMPARE("setp.eq." #T, T, a == b);                     \
  COMPARE("setp.ne." #T, T, a == a && b == b && a != b); \
  COMPARE("setp.lt." #T, T, a < b);                      \
  COMPARE("setp.le." #T, T, a <= b);                     \
  COMPARE("setp.gt." #T, T, a > b);                      \
  COMPARE("setp.ge." #T, T, a >= b);                     \
  COMPARE("setp.equ." #T, T, !(a < b) && !(a > b));      \
  COMPARE("setp.neu." #T, T, !(a == b));                 \
  COMPARE("setp.ltu." #T, T, !(a >= b));                 \
  COMPARE("setp.leu." #T, T, !(a > b));                  \
  COMPARE("setp.gtu." #T, T, !(a <= b));                 \
  COMPARE("setp.geu." #T, T, !(a < b));                  \
  COMPARE("setp.num." #T, T, a == a && b == b);          \
  COMPARE("setp.nan." #T, T, a != a || b != b);
FLOAT_COMPARES(f32)
FLOAT_COMPARES(f64)

// Two halves in a register.
template <class From, class To, class F>
inline u32 halves(u32 a, u32 b, u32 c, From from, To to, F f) {
  return to(f(from(a & 0xffff), from(b & 0xffff), from(c & 0xffff))) |
         to(f(from(a >> 16), from(b >> 16), from(c >> 16))) << 16;
}
#define HALVES(NAME, EXPRESSION)                                                                                  \
  TERNARY(NAME ".bf16x2", u32, u32, u32, u32,                                                                     \
          halves(a, b, c, from_bf16, to_bf16, [](f32 x, f32 y, f32 z) { return (void)y, (void)z, EXPRESSION; })); \
  TERNARY(NAME ".f16x2", u32, u32, u32, u32,                                                                      \
          halves(a, b, c, from_f16, to_f16, [](f32 x, f32 y, f32 z) { return (void)y, (void)z, EXPRESSION; }));
HALVES("fma", f32(f64(x) * f64(y) + f64(z)))
#define HALVES2(NAME, EXPRESSION)                                                            \
  BINARY(NAME ".bf16x2", u32, u32, u32,                                                      \
         halves(a, b, 0, from_bf16, to_bf16, [](f32 x, f32 y, f32) { return EXPRESSION; })); \
  BINARY(NAME ".f16x2", u32, u32, u32, halves(a, b, 0, from_f16, to_f16, [](f32 x, f32 y, f32) { return EXPRESSION; }));
HALVES2("add", x + y)
HALVES2("sub", x - y)
HALVES2("mul", x* y)
HALVES2("max.NaN", x != x ? x : y != y ? y : std::max(x, y))
HALVES2("min.NaN", x != x ? x : y != y ? y : std::min(x, y))
HALVES2("max", x != x ? y : y != y ? x : std::max(x, y))
HALVES2("min", x != x ? y : y != y ? x : std::min(x, y))
UNARY("tanh.f16", u16, u16, to_f16(std::tanh(from_f16(a))));
UNARY("tanh.f16x2", u32, u32, to_f16(std::tanh(from_f16(a & 0xffff))) | to_f16(std::tanh(from_f16(a >> 16))) << 16);
UNARY("tanh.bf16x2", u32, u32,
      to_bf16(std::tanh(from_bf16(a & 0xffff))) | to_bf16(std::tanh(from_bf16(a >> 16))) << 16);

// -------------------------------------------------------------------------------------------------------- conversions
template <class T>
inline T saturated(f64 x) {
  if (x != x) return 0;
  if (x <= f64(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (x >= f64(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return T(x);
}
using s8 = int8_t;
using u8 = uint8_t;
#define CONVERT(D, A) UNARY("cvt." #D "." #A, D, A, D(a));
#define CONVERT_FROM(A) \
  CONVERT(s8, A)        \
  CONVERT(u8, A)        \
  CONVERT(s16, A)       \
  CONVERT(u16, A) CONVERT(s32, A) CONVERT(u32, A) CONVERT(s64, A) CONVERT(u64, A) CONVERT(f32, A) CONVERT(f64, A)
CONVERT_FROM(s8)
CONVERT_FROM(u8)
CONVERT_FROM(s16)
CONVERT_FROM(u16)
CONVERT_FROM(s32)
CONVERT_FROM(u32)
CONVERT_FROM(s64)
CONVERT_FROM(u64)
UNARY("cvt.f32.f64", f32, f64, f32(a));
UNARY("cvt.f64.f32", f64, f32, f64(a));
#define FROM_FLOAT(D, A)                                              \
  UNARY("cvt.rzi." #D "." #A, D, A, saturated<D>(std::trunc(a)));     \
  UNARY("cvt.rni." #D "." #A, D, A, saturated<D>(std::nearbyint(a))); \
  UNARY("cvt.rmi." #D "." #A, D, A, saturated<D>(std::floor(a)));     \
  UNARY("cvt.rpi." #D "." #A, D, A, saturated<D>(std::ceil(a)));
FROM_FLOAT(s32, f32)
FROM_FLOAT(u32, f32)
FROM_FLOAT(s64, f32)
FROM_FLOAT(u64, f32)
FROM_FLOAT(s16, f32)
FROM_FLOAT(u16, f32)
FROM_FLOAT(s32, f64)
FROM_FLOAT(s64, f64)
UNARY("cvt.rzi.f32.f32", f32, f32, std::trunc(a));
UNARY("cvt.rni.f32.f32", f32, f32, std::nearbyint(a));
UNARY("cvt.rmi.f32.f32", f32, f32, std::floor(a));
UNARY("cvt.rpi.f32.f32", f32, f32, std::ceil(a));
UNARY("cvt.sat.f32.f32", f32, f32, a != a ? 0.0f : std::min(1.0f, std::max(0.0f, a)));
UNARY("cvt.f32.bf16", f32, u16, from_bf16(a));
UNARY("cvt.f32.f16", f32, u16, from_f16(a));
UNARY("cvt.bf16.f32", u16, f32, to_bf16(a));
UNARY("cvt.f16.f32", u16, f32, to_f16(a));
UNARY("cvt.tf32.f32", u32, f32, (to_bits(a) + 0x1000) & ~0x1fffu);
BINARY("cvt.bf16x2.f32", u32, f32, f32, to_bf16(a) << 16 | to_bf16(b));
BINARY("cvt.f16x2.f32", u32, f32, f32, to_f16(a) << 16 | to_f16(b));

// --------------------------------------------------------------------------------------- predicates, packing, choosing
inline Result logic(Warp& w, Instr const& i, uint32_t lanes, uint32_t value) {
  uint32_t& d = w.predicates[size_t(i.x[0])];
  d = (d & ~lanes) | (value & lanes);
  return kNext;
}
OP("and.pred", BODY { return logic(w, i, lanes, w.predicates[i.x[1]] & w.predicates[i.x[2]]); });
OP("or.pred", BODY { return logic(w, i, lanes, w.predicates[i.x[1]] | w.predicates[i.x[2]]); });
OP("xor.pred", BODY { return logic(w, i, lanes, w.predicates[i.x[1]] ^ w.predicates[i.x[2]]); });
OP("not.pred", BODY { return logic(w, i, lanes, ~w.predicates[i.x[1]]); });
OP("mov.pred", BODY { return logic(w, i, lanes, w.predicates[i.x[1]]); });
OP("set.pred", BODY { return logic(w, i, lanes, i.x[1] ? kAll : 0); });

template <class T>
inline Result select(Warp& w, Instr const& i, uint32_t lanes) {
  T *d = w.reg<T>(i.x[0]), *a = w.reg<T>(i.x[1]), *b = w.reg<T>(i.x[2]);
  uint32_t const which = w.predicates[size_t(i.x[3])];
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) d[l] = which >> l & 1 ? a[l] : b[l];
  }
  return kNext;
}
OP("selp.32", BODY { return select<u32>(w, i, lanes); });
OP("selp.64", BODY { return select<u64>(w, i, lanes); });

OP(
    "pack.32", BODY {
      each(lanes,
           [&](int l) { w.reg<u32>(i.x[0])[l] = (w.reg<u32>(i.x[1])[l] & 0xffff) | w.reg<u32>(i.x[2])[l] << 16; });
      return kNext;
    });
OP(
    "pack.64", BODY {
      each(lanes, [&](int l) { w.reg<u64>(i.x[0])[l] = u64(w.reg<u32>(i.x[2])[l]) << 32 | w.reg<u32>(i.x[1])[l]; });
      return kNext;
    });
OP(
    "pack4.64", BODY {
      each(lanes, [&](int l) {
        u64 d = 0;
        for (int n = 0; n < 4; ++n) d |= u64(w.reg<u32>(i.x[1 + n])[l] & 0xffff) << (16 * n);
        w.reg<u64>(i.x[0])[l] = d;
      });
      return kNext;
    });
OP(
    "unpack.32", BODY {
      each(lanes, [&](int l) {
        u32 const a = w.reg<u32>(i.x[2])[l];
        if (i.x[0] >= 0) w.reg<u32>(i.x[0])[l] = a & 0xffff;
        if (i.x[1] >= 0) w.reg<u32>(i.x[1])[l] = a >> 16;
      });
      return kNext;
    });
OP(
    "unpack.64", BODY {
      each(lanes, [&](int l) {
        u64 const a = w.reg<u64>(i.x[2])[l];
        if (i.x[0] >= 0) w.reg<u32>(i.x[0])[l] = u32(a);
        if (i.x[1] >= 0) w.reg<u32>(i.x[1])[l] = u32(a >> 32);
      });
      return kNext;
    });
OP(
    "unpack4.64", BODY {
      each(lanes, [&](int l) {
        u64 const a = w.reg<u64>(i.x[4])[l];
        for (int n = 0; n < 4; ++n) w.reg<u32>(i.x[n])[l] = u32(a >> (16 * n)) & 0xffff;
      });
      return kNext;
    });
OP(
    "add_number.64", BODY {  // an address of a variable: a register or nothing, and a number
      each(lanes, [&](int l) { w.reg<u64>(i.x[0])[l] = w.reg<u64>(i.x[1])[l] + u64(s64(i.x[2])); });
      return kNext;
    });
OP("tag.shared", BODY { return map1<u64, u64>(w, i, lanes, [](u64 a) { return a | kGenericShared; }); });
OP("untag.shared", BODY { return map1<u64, u64>(w, i, lanes, [](u64 a) { return a & ~kGenericShared; }); });
OP("tag.local", BODY { return map1<u64, u64>(w, i, lanes, [](u64 a) { return a | kGenericLocal; }); });
OP("untag.local", BODY { return map1<u64, u64>(w, i, lanes, [](u64 a) { return a & ~kGenericLocal; }); });
OP("nothing", BODY { return (void)w, (void)i, (void)lanes, kNext; });
OP(
    "griddepcontrol.wait", BODY {
      (void)i, (void)lanes;
      if (!w.block->waited) ++w.machine->waited;
      w.block->waited = true;
      return kNext;
    });
OP(
    "trap", BODY {
      (void)w, (void)i, (void)lanes;
      fail("trap");
    });
OP(
    "clock.64", BODY {
      each(lanes, [&](int l) { w.reg<u64>(i.x[0])[l] = w.machine->now; });
      return kNext;
    });

// --------------------------------------------------------------------------------------------------- among the lanes
template <class F>
inline Result shuffle(Warp& w, Instr const& i, uint32_t lanes, F source) {
  // d, p (or -1), a, b, c, members
  u32 taken[kLanes];
  uint32_t valid = 0;
  each(lanes, [&](int l) {
    u32 const c = w.reg<u32>(i.x[4])[l], segment = c >> 8 & 31, clamp = c & 31;
    int const first = l & int(segment), last = first | (int(clamp) & ~int(segment));
    auto const [from, good] = source(l, int(w.reg<u32>(i.x[3])[l]), first, last, int(segment));
    int const use = good ? from : l;
    if (!(lanes >> use & 1)) fail("a shuffle from a lane that does not take part");
    taken[l] = w.reg<u32>(i.x[2])[use];
    valid |= uint32_t(good) << l;
  });
  each(lanes, [&](int l) { w.reg<u32>(i.x[0])[l] = taken[l]; });
  if (i.x[1] >= 0) {
    uint32_t& p = w.predicates[size_t(i.x[1])];
    p = (p & ~lanes) | valid;
  }
  return kNext;
}
using Source = std::pair<int, bool>;
OP(
    "shfl.up",
    BODY {
      return shuffle(w, i, lanes,
                     [](int l, int b, int, int last, int) { return Source{l - (b & 31), l - (b & 31) >= last}; });
    },
    kMembers);
OP(
    "shfl.down",
    BODY {
      return shuffle(w, i, lanes,
                     [](int l, int b, int, int last, int) { return Source{l + (b & 31), l + (b & 31) <= last}; });
    },
    kMembers);
OP(
    "shfl.bfly",
    BODY {
      return shuffle(w, i, lanes,
                     [](int l, int b, int, int last, int) { return Source{l ^ (b & 31), (l ^ (b & 31)) <= last}; });
    },
    kMembers);
OP(
    "shfl.idx",
    BODY {
      return shuffle(w, i, lanes, [](int, int b, int first, int last, int segment) {
        int const from = first | (b & 31 & ~segment);
        return Source{from, from <= last};
      });
    },
    kMembers);
OP("vote.any", BODY { return logic(w, i, lanes, w.predicates[i.x[1]] & lanes ? kAll : 0); }, kMembers);
OP("vote.all", BODY { return logic(w, i, lanes, (w.predicates[i.x[1]] & lanes) == lanes ? kAll : 0); }, kMembers);
OP(
    "vote.uni",
    BODY {
      uint32_t const p = w.predicates[size_t(i.x[1])] & lanes;
      return logic(w, i, lanes, p == 0 || p == lanes ? kAll : 0);
    },
    kMembers);
OP(
    "vote.ballot",
    BODY {
      uint32_t const found = w.predicates[size_t(i.x[1])] & lanes;
      each(lanes, [&](int l) { w.reg<u32>(i.x[0])[l] = found; });
      return kNext;
    },
    kMembers);
template <class T, class F>
inline Result reduce(Warp& w, Instr const& i, uint32_t lanes, F f) {
  T value = w.reg<T>(i.x[1])[__builtin_ctz(lanes)];
  each(lanes & (lanes - 1), [&](int l) { value = f(value, w.reg<T>(i.x[1])[l]); });
  each(lanes, [&](int l) { w.reg<T>(i.x[0])[l] = value; });
  return kNext;
}
#define REDUCE(NAME, T, EXPRESSION) \
  OP("redux." NAME, BODY { return reduce<T>(w, i, lanes, [](T a, T b) { return T(EXPRESSION); }); }, kMembers)
REDUCE("or.b32", u32, a | b);
REDUCE("and.b32", u32, a& b);
REDUCE("xor.b32", u32, a ^ b);
REDUCE("add.s32", s32, u32(a) + u32(b));
REDUCE("add.u32", u32, a + b);
REDUCE("min.s32", s32, std::min(a, b));
REDUCE("max.s32", s32, std::max(a, b));
REDUCE("min.u32", u32, std::min(a, b));
REDUCE("max.u32", u32, std::max(a, b));
OP(
    "match.any.b32",
    BODY {
      u32 found[kLanes];
      each(lanes, [&](int l) {
        found[l] = 0;
        each(lanes, [&](int o) { found[l] |= u32(w.reg<u32>(i.x[1])[o] == w.reg<u32>(i.x[1])[l]) << o; });
      });
      each(lanes, [&](int l) { w.reg<u32>(i.x[0])[l] = found[l]; });
      return kNext;
    },
    kMembers);
OP(
    "elect",
    BODY {
      int const first = __builtin_ctz(lanes);
      if (i.x[0] >= 0) each(lanes, [&](int l) { w.reg<u32>(i.x[0])[l] = u32(first); });
      uint32_t& p = w.predicates[size_t(i.x[1])];
      p = (p & ~lanes) | 1u << first;
      return kNext;
    },
    kMembers);
OP(
    "activemask.b32", BODY {
      each(lanes, [&](int l) { w.reg<u32>(i.x[0])[l] = lanes; });
      return kNext;
    });
OP("bar.warp", BODY { return (void)w, (void)i, (void)lanes, kNext; }, kMembers);
OP("aligned", BODY { return (void)w, (void)i, (void)lanes, kNext; }, kAligned);

}  // namespace simulator
