// One step of AdamW or Adam on a CPU, of a parameter whose moments have 8 bits: `update_blocks` of adamw_update.py in
// one pass over memory. A block of 128 is unpacked into what the first cache holds, stepped and packed again.
//
// Each operation is one of torch's and rounds as it does, so that weights, codes and scales are those of the operators
// bit for bit. Hence no -ffast-math, and -ffp-contract=off: products are added with one rounding only where torch's
// vectorised operators do so (`fused`). The loops are vectorised by the compiler.
//
// Plain C++17 without headers of torch or Python, which would take several times as long to compile. Threads are those of
// the call: a second OpenMP runtime in the process would fight with torch's own.

#include <pthread.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int BLOCK = 128;
constexpr int64_t PIECE = 1024;  // blocks that a thread takes at a time: 0.1 ms, some times what starting it costs
constexpr int64_t MOST_THREADS = 256;
constexpr uint32_t QUIET_NAN = 0x7FC00000, UPPER = 0xFFFF0000, INFINITE = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;
constexpr float TINY = 0x1p-126f, MOST = 0x1.fffffep+127f;

// How the fp32 master of a weight is kept; cpu_kernel.py counts the same.
enum Master { FP32, STOCHASTIC, BITS24, BITS32 };

struct Step {  // `_Step` of cpu_kernel.py
    void* weight;
    const void* grad;
    void* correction;
    int8_t* exp_avg;
    float* exp_avg_scale;
    uint8_t* exp_avg_sq;
    float* exp_avg_sq_scale;
    int64_t numel, threads, first_row;
    uint64_t seed, seed_of_weights;
    float scale, shrink, pull, first, keep, second, correction2, eps, rate, bound;
};

inline float as_float(uint32_t raw) {
    float value;
    std::memcpy(&value, &raw, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t raw;
    std::memcpy(&raw, &value, sizeof raw);
    return raw;
}

inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline float load(float value) { return value; }
inline float load(uint16_t bf16) { return as_float(uint32_t(bf16) << 16); }

// `random_numbers.uniform`, of a row and of a column in it.
inline float start_of(uint64_t row, uint64_t seed) {
    return float(int32_t(((row * 3242174889u + seed) >> 8) & 0xFFFFFF)) * 0x1p-24f;
}

inline float uniform(float start, int column) {
    const float number = start + float(column) * 0.5698402909980532f;
    return number - std::floor(number);
}

template <Master M> struct Types {};
template <> struct Types<FP32> { using Weight = float; using Correction = int8_t; };
template <> struct Types<STOCHASTIC> { using Weight = uint16_t; using Correction = int8_t; };
template <> struct Types<BITS24> { using Weight = uint16_t; using Correction = int8_t; };
template <> struct Types<BITS32> { using Weight = uint16_t; using Correction = int16_t; };

// Widening and narrowing stay in loops of their own: a loop whose numbers are all of 4 bytes needs no shuffles.

template <Master M>
inline void join(const typename Types<M>::Weight* weight, const typename Types<M>::Correction* correction, float* to) {
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) to[i] = load(weight[i]);
    if constexpr (M == BITS24 || M == BITS32) {
        alignas(64) int32_t units[BLOCK];
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) units[i] = correction[i];
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) {
            const int32_t above = to[i] == 0.0f && units[i] < 0 ? 0 : units[i];
            to[i] = as_float(as_bits(to[i]) + (uint32_t(above) << (M == BITS24 ? 8 : 0)));
        }
    }
}

template <Master M>
inline void split(const float* master, uint16_t* weight, typename Types<M>::Correction* correction, float start) {
    alignas(64) uint32_t upper[BLOCK];
    alignas(64) int32_t units[BLOCK];
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t raw = master[i] == master[i] ? as_bits(master[i]) : QUIET_NAN;
        if constexpr (M == STOCHASTIC) {
            const uint32_t up = raw + uint32_t(int32_t(uniform(start, i) * 65536.0f));
            upper[i] = (raw & MAGNITUDE) < INFINITE ? up : raw;
        } else if constexpr (M == BITS24) {
            upper[i] = (raw + 0x7FFF + ((raw >> 16) & 1)) & UPPER;
            const int32_t off = int32_t(raw - upper[i] + 0x80) >> 8;
            units[i] = off < -127 ? -127 : off > 127 ? 127 : off;
        } else {
            upper[i] = (raw + 0x8000) & UPPER;
            units[i] = int32_t(raw - upper[i]);
        }
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) weight[i] = uint16_t(upper[i] >> 16);
    if constexpr (M == BITS24 || M == BITS32) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) correction[i] = typename Types<M>::Correction(units[i]);
    }
}

// The scale of a block with this largest magnitude, given as its bits, by which NaN is the largest of all.
inline float scale_of(int32_t largest) { return largest == int32_t(INFINITE) ? MOST : as_float(uint32_t(largest)); }

inline float reciprocal(float scale) { return 1.0f / (scale < TINY ? TINY : scale); }

template <Master M, class Grad>
void step_block(const Step& by, int64_t row, typename Types<M>::Weight* weight, const Grad* grad,
                typename Types<M>::Correction* correction, int8_t* exp_avg, float* exp_avg_scale, uint8_t* exp_avg_sq,
                float* exp_avg_sq_scale) {
    alignas(64) float master[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK];
    alignas(64) int32_t m_code[BLOCK], v_code[BLOCK];
    const float m_scale = *exp_avg_scale, v_scale = *exp_avg_sq_scale;
    join<M>(weight, correction, master);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        const float given = load(grad[i]), above = given < -by.bound ? -by.bound : given;
        g[i] = (above > by.bound ? by.bound : above) * by.scale;
        master[i] *= by.shrink;
    }
    if (by.pull != 0.0f) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) g[i] = fused(by.pull, master[i], g[i]);
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        m[i] = float(exp_avg[i]);
        v[i] = float(exp_avg_sq[i]);
    }
    const bool near = by.first < 0.5f;  // torch's lerp starts from the nearer end
    const float part = near ? by.first : by.first - 1.0f;
    int32_t m_largest = 0, v_largest = 0;
#pragma omp simd reduction(max : m_largest, v_largest)
    for (int i = 0; i < BLOCK; i++) {
        const float curve = m[i] * float(1 / 127.0);
        const float before = curve / (2.0f - std::fabs(curve)) * m_scale;
        m[i] = fused(part, g[i] - before, near ? before : g[i]);
        const float root = v[i] * float(1 / 255.0);
        v[i] = fused(by.second * g[i], g[i], root * root * v_scale * by.keep);
        const int32_t m_bits = int32_t(as_bits(m[i]) & MAGNITUDE), v_bits = int32_t(as_bits(v[i]) & MAGNITUDE);
        m_largest = m_bits > m_largest ? m_bits : m_largest;
        v_largest = v_bits > v_largest ? v_bits : v_largest;
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++)
        master[i] += m[i] * -by.rate / (std::sqrt(v[i]) / by.correction2 + by.eps);
    if constexpr (M == FP32)
        std::memcpy(weight, master, sizeof master);
    else
        split<M>(master, weight, correction, start_of(uint64_t(row + by.first_row), by.seed_of_weights));
    *exp_avg_scale = scale_of(m_largest);
    *exp_avg_sq_scale = scale_of(v_largest);
    const float m_factor = reciprocal(*exp_avg_scale), v_factor = reciprocal(*exp_avg_sq_scale);
    const float start = start_of(uint64_t(row + by.first_row), by.seed);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        const float scaled = m[i] * m_factor;
        const float code = std::nearbyint(254.0f * scaled / (1.0f + std::fabs(scaled)));
        m_code[i] = int32_t(code == code ? code : 0.0f);
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        float square = v[i] * v_factor * 65025.0f;
        square = square < 65025.0f ? square : 65025.0f;
        const int32_t whole = int32_t(std::sqrt(square));
        const float below = float(whole);
        const float way = uniform(start, i) * (2.0f * below + 1.0f);
        const int32_t code = square - below * below > way ? whole + 1 : whole, least = v[i] > 0.0f;
        v_code[i] = code > least ? code : least;
    }
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        exp_avg[i] = int8_t(m_code[i]);
        exp_avg_sq[i] = uint8_t(v_code[i]);
    }
}

template <Master M, class Grad> void step_rows(const Step& by, int64_t first, int64_t last) {
    using Weight = typename Types<M>::Weight;
    using Correction = typename Types<M>::Correction;
    auto weight = static_cast<Weight*>(by.weight);
    auto grad = static_cast<const Grad*>(by.grad);
    auto correction = static_cast<Correction*>(by.correction);
    for (int64_t row = first; row < last; row++) {
        const int64_t at = row * BLOCK, rest = by.numel - at;
        auto units = correction == nullptr ? nullptr : correction + at;
        if (rest >= BLOCK) {
            step_block<M, Grad>(by, row, weight + at, grad + at, units, by.exp_avg + at,
                                by.exp_avg_scale + row, by.exp_avg_sq + at, by.exp_avg_sq_scale + row);
            continue;
        }
        Weight w[BLOCK] = {};  // a short last block: zeros beyond it change neither its scales nor its numbers
        Grad g[BLOCK] = {};
        Correction c[BLOCK] = {};
        int8_t m[BLOCK] = {};
        uint8_t v[BLOCK] = {};
        const size_t count = size_t(rest);
        std::memcpy(w, weight + at, count * sizeof *w);
        std::memcpy(g, grad + at, count * sizeof *g);
        std::memcpy(m, by.exp_avg + at, count);
        std::memcpy(v, by.exp_avg_sq + at, count);
        if (units != nullptr) std::memcpy(c, units, count * sizeof *c);
        step_block<M, Grad>(by, row, w, g, c, m, by.exp_avg_scale + row, v, by.exp_avg_sq_scale + row);
        std::memcpy(weight + at, w, count * sizeof *w);
        std::memcpy(by.exp_avg + at, m, count);
        std::memcpy(by.exp_avg_sq + at, v, count);
        if (units != nullptr) std::memcpy(units, c, count * sizeof *c);
    }
}

using Rows = void (*)(const Step&, int64_t, int64_t);

struct Job {
    const Step& by;
    Rows rows;
    int64_t count;
    std::atomic<int64_t> next;
};

void* work(void* given) {
    Job& job = *static_cast<Job*>(given);
    for (;;) {
        const int64_t first = job.next.fetch_add(PIECE);
        if (first >= job.count) return nullptr;
        job.rows(job.by, first, first + PIECE < job.count ? first + PIECE : job.count);
    }
}

}  // namespace

// Step a whole parameter. `master` is a `Master`; `wide_grad` tells an fp32 gradient from a bf16 one.
extern "C" void lightning_solo_compact_adamw(const Step* by, int32_t master, int32_t wide_grad) {
    static const Rows kinds[4][2] = {
        {step_rows<FP32, uint16_t>, step_rows<FP32, float>},
        {step_rows<STOCHASTIC, uint16_t>, step_rows<STOCHASTIC, float>},
        {step_rows<BITS24, uint16_t>, step_rows<BITS24, float>},
        {step_rows<BITS32, uint16_t>, step_rows<BITS32, float>},
    };
    Job job{*by, kinds[master][wide_grad], (by->numel + BLOCK - 1) / BLOCK, {0}};
    const int64_t pieces = (job.count + PIECE - 1) / PIECE;
    int64_t threads = by->threads < pieces ? by->threads : pieces;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    pthread_t others[MOST_THREADS];
    int64_t started = 0;
    // one that can't be started is done without: who is there takes piece after piece until none is left
    while (started + 1 < threads && pthread_create(&others[started], nullptr, work, &job) == 0) started++;
    work(&job);
    for (int64_t i = 0; i < started; i++) pthread_join(others[i], nullptr);
}
