// Many tensors to one flat bucket, and back, in one launch: see kernels/pack.py, which compiles this with TENSOR, BUCKET
// (element types, below) and SCALED defined, and whose NumPy twins say the same.
//
// A thread moves VECTOR consecutive elements of the bucket: 16 bytes on the side of the smaller elements, several times
// 16 on the other. Those of one tensor, if they lie right in memory, are read and written 16 bytes at a time, else one by
// one. Conversions are written out, so that they are the same on a GPU and on the host.

typedef long long word;

#define DEVICE static __device__ __forceinline__

// Bits of numbers.

DEVICE float as_float(unsigned bits) { return __uint_as_float(bits); }
DEVICE unsigned as_bits(float number) { return __float_as_uint(number); }

// A small float is widened by moving its exponent and fraction to where float has them and correcting the bias; it is
// rounded to nearest even, and what is too large becomes infinity, or NaN where the format has no infinity.
template <int BITS, int FRACTION, int BIAS, unsigned SPECIAL, unsigned NAN_BITS>
struct Small {
  static const unsigned SIGN = 1u << (BITS - 1);

  DEVICE float widen(unsigned bits) {
    const unsigned magnitude = bits & (SIGN - 1), moved = magnitude << (23 - FRACTION);
    const float value = as_float(moved) * as_float((254u - BIAS) << 23);
    const unsigned number = magnitude >= SPECIAL ? moved | 0x7F800000u : as_bits(value);
    return as_float(number | (bits & SIGN) << (32 - BITS));
  }

  DEVICE unsigned round(float number) {
    const int drop = 23 - FRACTION;
    const unsigned bits = as_bits(number), magnitude = bits & 0x7FFFFFFFu, sign = bits >> (32 - BITS) & SIGN;
    if (magnitude > 0x7F800000u) return NAN_BITS | sign;
    unsigned result;
    if (magnitude < (128u - BIAS) << 23) {  // below the smallest normal number: float rounds at the anchor's last place
      const unsigned anchor = (128u - BIAS + drop) << 23;
      result = as_bits(as_float(magnitude) + as_float(anchor)) - anchor;
    } else {
      result = ((magnitude + ((1u << (drop - 1)) - 1) + (magnitude >> drop & 1)) >> drop) - ((127u - BIAS) << FRACTION);
    }
    return (result > SPECIAL ? SPECIAL : result) | sign;
  }
};

typedef Small<16, 10, 15, 0x7C00, 0x7E00> Half;
typedef Small<8, 2, 15, 0x7C, 0x7E> E5M2;
typedef Small<8, 3, 7, 0x7F, 0x7F> E4M3;

// Element types: how each is stored, what it is calculated in, and how the one becomes the other.

template <typename STORED>
struct Raw {  // moved as it is
  typedef STORED stored;
  typedef STORED number;
  DEVICE number widen(stored x) { return x; }
  DEVICE stored round(number x) { return x; }
};

template <typename STORED, typename FORMAT>
struct Rounded {
  typedef STORED stored;
  typedef float number;
  DEVICE number widen(stored x) { return FORMAT::widen(x); }
  DEVICE stored round(number x) { return (stored)FORMAT::round(x); }
};

struct Upper {  // bfloat16: the upper half of a float
  DEVICE float widen(unsigned bits) { return as_float(bits << 16); }
  DEVICE unsigned round(float number) {
    const unsigned bits = as_bits(number), upper = bits >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? upper | 0x40u : (bits + 0x7FFFu + (upper & 1)) >> 16;
  }
};

typedef Raw<double> float64;
typedef Raw<float> float32;
typedef Rounded<unsigned short, Half> float16;
typedef Rounded<unsigned short, Upper> bfloat16;
typedef Rounded<unsigned char, E5M2> float8_e5m2;
typedef Rounded<unsigned char, E4M3> float8_e4m3fn;
typedef Raw<unsigned char> bytes1;
typedef Raw<unsigned short> bytes2;
typedef Raw<unsigned> bytes4;
typedef Raw<unsigned long long> bytes8;

struct __align__(16) Quad { unsigned x, y, z, w; };
typedef Raw<Quad> bytes16;

template <typename TO, typename FROM>
DEVICE typename TO::stored convert(typename FROM::stored x, double scale) {
#if SCALED
  typedef decltype(typename FROM::number() + typename TO::number()) wide;  // double if either is
  return TO::round((typename TO::number)((wide)FROM::widen(x) * (wide)scale));
#else
  return TO::round(FROM::widen(x));
#endif
}

// The job: words.
enum { JOB_SEGMENTS, JOB_STARTS, JOB_COUNTS, JOB_ADDRESSES, JOB_BUCKET, JOB_LENGTH, JOB_SCALE };

typedef TENSOR Tensor;
typedef BUCKET Bucket;
typedef Tensor::stored T;
typedef Bucket::stored B;

static const int SMALLER = sizeof(T) < sizeof(B) ? sizeof(T) : sizeof(B);
static const int VECTOR = 16 / SMALLER;

template <typename ELEMENT>
union Vector {
  __device__ Vector() {}
  ELEMENT of[VECTOR];
  Quad quads[VECTOR * sizeof(ELEMENT) / 16];
};

// 16 bytes at once: the compiler would split some of them.
DEVICE Quad get(const Quad* from) {
#ifdef __CUDA_ARCH__
  Quad q;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(from));
  return q;
#else
  return *from;
#endif
}

DEVICE void put(Quad* to, Quad q) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory");
#else
  *to = q;
#endif
}

template <typename ELEMENT>
DEVICE void load(Vector<ELEMENT>& vector, const ELEMENT* from) {
#pragma unroll
  for (int i = 0; i < (int)(sizeof(vector) / 16); i++) vector.quads[i] = get((const Quad*)from + i);
}

template <typename ELEMENT>
DEVICE void store(ELEMENT* to, const Vector<ELEMENT>& vector) {
#pragma unroll
  for (int i = 0; i < (int)(sizeof(vector) / 16); i++) put((Quad*)to + i, vector.quads[i]);
}

// The last segment from `low` to `high` that begins at or before an element of the bucket.
DEVICE word find(const word* starts, word low, word high, word element) {
  while (low < high) {
    const word middle = (low + high + 1) >> 1;
    if (starts[middle] <= element) low = middle; else high = middle - 1;
  }
  return low;
}

// What all threads of a block have to do with: VECTOR * blockDim.x elements of the bucket at a time.
template <bool PACK>
DEVICE void move(const word* job) {
  const word segments = job[JOB_SEGMENTS], length = job[JOB_LENGTH];
  const word *starts = (const word*)job[JOB_STARTS], *counts = (const word*)job[JOB_COUNTS];
  const word* addresses = (const word*)job[JOB_ADDRESSES];
  B* const bucket = (B*)job[JOB_BUCKET];
  const double scale = *(const double*)(job + JOB_SCALE);
  const word tile = (word)VECTOR * blockDim.x;

  for (word begin = tile * blockIdx.x; begin < length; begin += tile * gridDim.x) {
    const word at = begin + (word)VECTOR * threadIdx.x;
    if (at >= length) continue;
    const word end = begin + tile < length ? begin + tile : length;
    const word first = find(starts, 0, segments - 1, begin);  // the same for all threads, and so are the looks
    word s = find(starts, first, find(starts, first, segments - 1, end - 1), at);
    const word from = at - starts[s];
    T* const tensor = (T*)addresses[s] + from;
    Vector<T> inner;
    Vector<B> outer;
    const bool whole = from >= 0 && from + VECTOR <= counts[s];
    if (whole && ((unsigned long long)tensor & 15) == 0) {
      if (PACK) {
        load(inner, tensor);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) outer.of[i] = convert<Bucket, Tensor>(inner.of[i], scale);
        store(bucket + at, outer);
      } else {
        load(outer, bucket + at);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) inner.of[i] = convert<Tensor, Bucket>(outer.of[i], scale);
        store(tensor, inner);
      }
      continue;
    }
    for (word element = at; element < end && element < at + VECTOR; element++) {
      while (s + 1 < segments && starts[s + 1] <= element) s++;
      const word place = element - starts[s];
      const bool inside = place >= 0 && place < counts[s];
      T* const one = (T*)addresses[s] + place;
      if (PACK) {
        bucket[element] = inside ? convert<Bucket, Tensor>(*one, scale) : B();  // between tensors: zeros
      } else if (inside) {
        *one = convert<Tensor, Bucket>(bucket[element], scale);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) pack(const word* job) { move<true>(job); }
extern "C" __global__ void __launch_bounds__(256) unpack(const word* job) { move<false>(job); }
