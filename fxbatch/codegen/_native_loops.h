/* Loops over the numbers of one row or block: included once an instruction set, with LOOP(name) defined.

   Every loop takes (out, a, b, c, count, k): contiguous operands, of which it reads as many as it has, and
   one number. Written so that the compiler vectorises them: no calls, no branches. */

#define EACH for (int64_t i = 0; i < count; i++)
#define LOOP_OF(name, to, ta, tb, tc, expression)                                                            \
    static void LOOP(name)(void *out, const void *pa, const void *pb, const void *pc, int64_t count, double number) \
    {                                                                                                        \
        to *o = out;                                                                                         \
        const ta *a = pa;                                                                                    \
        const tb *b = pb;                                                                                    \
        const tc *c = pc;                                                                                    \
        const float k = (float)number;                                                                       \
        (void)a, (void)b, (void)c, (void)k;                                                                  \
        _Pragma("GCC ivdep") EACH o[i] = (to)(expression);                                                   \
    }

static inline __attribute__((always_inline)) float LOOP(bits_float)(int32_t bits)
{
    union { int32_t i; float f; } u = {bits};
    return u.f;
}

static inline __attribute__((always_inline)) int32_t LOOP(float_bits)(float number)
{
    union { float f; int32_t i; } u = {number};
    return u.i;
}

/* (exp(r) - 1 - r) / r^2, |r| <= ln 2 / 2. Polynomial: Moshier, Cephes Math Library 2.8, single/expf.c. */
static inline __attribute__((always_inline)) float LOOP(exp_series)(float r)
{
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    return p * r + 5.0000001201e-1f;
}

/* exp: 2^n * exp(r), |r| <= ln 2 / 2, n applied in two halves so that results down to the least subnormal
   and up to infinity come out. */
static inline __attribute__((always_inline)) float LOOP(exp1)(float x)
{
    float y = x > 89.0f ? 89.0f : x;
    y = y < -104.0f ? -104.0f : y;
    float shifted = y * 1.44269504088896341f + 12582912.0f;
    float whole = shifted - 12582912.0f;
    int32_t n = LOOP(float_bits)(shifted) - 0x4b400000;
    float r = y - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    float p = LOOP(exp_series)(r) * (r * r) + r + 1.0f;
    int32_t half = n >> 1;
    return p * LOOP(bits_float)((half + 127) << 23) * LOOP(bits_float)((n - half + 127) << 23);
}

/* tanh: x + x z P(z), z = x^2, below 0.625 and 1 - 2 / (exp(2 |x|) + 1) above, with the sign of x, of a zero too.
   Source: Cephes, single/tanhf.c. */
static inline __attribute__((always_inline)) float LOOP(tanh1)(float x)
{
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    float size = LOOP(bits_float)(LOOP(float_bits)(x) & 0x7fffffff);
    float near = size * (p * z) + size;
    float far = 1.0f - 2.0f / (LOOP(exp1)(size + size) + 1.0f);
    float result = size < 0.625f ? near : far;
    return LOOP(bits_float)(LOOP(float_bits)(result) | (LOOP(float_bits)(x) & (int32_t)0x80000000));
}

/* exp(x) - 1 of x <= 0, by exp's polynomial: 2^n (exp(r) - 1) + (2^n - 1), which is as exact near 0 as elsewhere. */
static inline __attribute__((always_inline)) float LOOP(expm1_below)(float x)
{
    float y = x < -80.0f ? -80.0f : x;
    float shifted = y * 1.44269504088896341f + 12582912.0f;
    float whole = shifted - 12582912.0f;
    float r = y - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    float p = LOOP(exp_series)(r) * (r * r) + r;
    float scale = LOOP(bits_float)((LOOP(float_bits)(shifted) - 0x4b400000 + 127) << 23);
    float result = scale * p + (scale - 1.0f);
    return LOOP(bits_float)(LOOP(float_bits)(result) | (LOOP(float_bits)(x) & (int32_t)0x80000000));
}

#include "_native_operations.h"

/* out += row, both of `count` numbers. */
static void LOOP(accumulate)(float *out, const float *row, int64_t count)
{
    _Pragma("GCC ivdep") EACH out[i] += row[i];
}

/* Sums down the columns of rows [rows, count] into out, in double. */
static void LOOP(sum_rows)(float *out, const float *rows, int64_t stride, int64_t number, int64_t count)
{
    double sums[256];
    for (int64_t from = 0; from < count; from += 256) {
        int64_t width = count - from < 256 ? count - from : 256;
        for (int64_t i = 0; i < width; i++)
            sums[i] = 0.0;
        for (int64_t r = 0; r < number; r++) {
            const float *row = rows + r * stride + from;
            _Pragma("GCC ivdep") for (int64_t i = 0; i < width; i++) sums[i] += row[i];
        }
        for (int64_t i = 0; i < width; i++)
            out[from + i] = (float)sums[i];
    }
}

/* log(softmax(a)), or softmax(a) itself, of one row. */
static void LOOP(log_softmax)(float *out, const float *a, int64_t count, int logarithm)
{
    float most = -INFINITY;
    int odd = 0;
    EACH {
        most = a[i] > most ? a[i] : most;
        odd |= a[i] != a[i];
    }
    if (odd)
        most = NAN;
    _Pragma("GCC ivdep") EACH out[i] = LOOP(exp1)(a[i] - most);
    double sum = 0.0;
    EACH sum += out[i];
    if (logarithm) {
        float less = logf((float)sum);
        _Pragma("GCC ivdep") EACH out[i] = a[i] - most - less;
    } else {
        float scale = (float)(1.0 / sum);
        _Pragma("GCC ivdep") EACH out[i] *= scale;
    }
}

/* The gradient of one row of log_softmax (y = its result) or of softmax. */
static void LOOP(log_softmax_backward)(float *out, const float *g, const float *y, int64_t count, int logarithm)
{
    double sum = 0.0;
    if (logarithm) {
        EACH sum += g[i];
        float total = (float)sum;
        _Pragma("GCC ivdep") EACH out[i] = g[i] - LOOP(exp1)(y[i]) * total;
    } else {
        EACH sum += (double)g[i] * y[i];
        float total = (float)sum;
        _Pragma("GCC ivdep") EACH out[i] = y[i] * (g[i] - total);
    }
}

/* log(sum(exp)) of elements that are `step` apart, of each of `count` neighbours. */
static void LOOP(log_sum_exp)(float *out, const float *a, int64_t step, int64_t terms, int64_t count)
{
    for (int64_t from = 0; from < count; from += 64) {
        int64_t width = count - from < 64 ? count - from : 64;
        float most[64];
        double sums[64];
        for (int64_t j = 0; j < width; j++) {
            most[j] = -INFINITY;
            sums[j] = 0.0;
        }
        for (int64_t i = 0; i < terms; i++)
            for (int64_t j = 0; j < width; j++)
                most[j] = a[i * step + from + j] > most[j] ? a[i * step + from + j] : most[j];
        for (int64_t j = 0; j < width; j++)
            most[j] = most[j] < INFINITY && most[j] > -INFINITY ? most[j] : 0.0f;
        for (int64_t i = 0; i < terms; i++)
            _Pragma("GCC ivdep") for (int64_t j = 0; j < width; j++)
                sums[j] += LOOP(exp1)(a[i * step + from + j] - most[j]);
        for (int64_t j = 0; j < width; j++)
            out[from + j] = logf((float)sums[j]) + most[j];
    }
}

static const Loops LOOP(loops) = {
    LEVEL,
    {EVERY_LOOP},
    LOOP(accumulate),
    LOOP(sum_rows),
    LOOP(log_softmax),
    LOOP(log_softmax_backward),
    LOOP(log_sum_exp),
};

#undef EACH
#undef LOOP_OF
