// Random calls of the C interface under sanitizers.  Every tensor is its own heap block of exactly the bytes its strides reach, so
// that the address sanitizer sees any access outside.  Values are checked lightly: finite inputs must give finite outputs.
//   fuzz [seconds] [seed]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cosformer.h"

namespace {

constexpr int64_t F32 = COSFORMER_F32, BF16 = COSFORMER_BF16, F16 = COSFORMER_F16;
std::mt19937_64 rng;
int64_t pick(int64_t low, int64_t high) { return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1)); }
int64_t one_of(std::initializer_list<int64_t> of) { return *(of.begin() + pick(0, static_cast<int64_t>(of.size()) - 1)); }
bool chance(int percent) { return pick(1, 100) <= percent; }
float uniform() { return static_cast<float>(rng() % 2001) / 1000 - 1; }

std::vector<std::unique_ptr<char[]>> blocks;  // freed after each call

template <class T>
T *allocate(int64_t count) {
    blocks.emplace_back(new char[static_cast<size_t>(count) * sizeof(T)]);
    return reinterpret_cast<T *>(blocks.back().get());
}

uint16_t bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return static_cast<uint16_t>(u >> 16);
}

// A tensor of the given sizes with its dimensions in random order in memory, perhaps spaced, perhaps expanded.
cosformer_tensor tensor(std::initializer_list<int64_t> sizes, int64_t dtype, bool output, bool last_dense = false) {
    cosformer_tensor t = {};
    t.dtype = dtype;
    std::vector<int64_t> size(sizes);
    int order[4] = {0, 1, 2, 3};
    for (int i = (last_dense ? 2 : 3); i > 0; i--) std::swap(order[i], order[pick(0, i)]);
    int64_t step = last_dense ? 1 : one_of({1, 1, 1, 2}), reach = 1;
    for (int i = 3; i >= 0; i--) {
        int d = order[i];
        if (!output && !last_dense && chance(5)) continue;  // stride 0
        t.stride[d] = step;
        reach += (size[d] - 1) * step;
        step *= size[d];
        if (chance(20)) step += pick(1, 5);
    }
    for (int64_t n : size) if (n == 0) return t;
    if (dtype == F32) {
        float *p = allocate<float>(reach);
        for (int64_t i = 0; i < reach; i++) p[i] = uniform();
        t.data = p;
    } else {
        uint16_t *p = allocate<uint16_t>(reach);
        for (int64_t i = 0; i < reach; i++) p[i] = dtype == BF16 ? bf16(uniform()) : static_cast<uint16_t>(rng() & 0xbbff);  // |x| < 1
        t.data = p;
    }
    return t;
}

bool finite(const cosformer_tensor &t, std::initializer_list<int64_t> sizes) {
    if (!t.data || t.dtype != F32) return true;
    const int64_t *n = sizes.begin();
    for (int64_t a = 0; a < n[0]; a++)
        for (int64_t b = 0; b < n[1]; b++)
            for (int64_t c = 0; c < n[2]; c++)
                for (int64_t d = 0; d < n[3]; d++)
                    if (!std::isfinite(static_cast<float *>(t.data)[a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3]])) return false;
    return true;
}

bool one_call() {
    blocks.clear();
    cosformer_call c = {};
    cosformer_grads g = {};
    const int64_t half = one_of({F32, F32, BF16, F16});
    c.B = pick(1, 2), c.Hk = pick(1, 2), c.H = c.Hk * pick(1, 2);
    c.D = chance(80) ? pick(1, 40) : pick(1, 256), c.E = chance(80) ? pick(1, 40) : pick(1, 256);
    c.L = chance(15) ? 1 : chance(90) ? pick(0, 150) : pick(150, 1400), c.S = c.L;
    c.causal = chance(60), c.relu = chance(80), c.threads = pick(1, 3), c.eps = 1e-6;
    const bool packed = chance(20), cross = !packed && chance(30), stream = !packed && !cross && c.causal && chance(50);
    if (cross) c.S = pick(0, 200), c.q_offset = pick(0, 150);
    if (packed) {
        c.B = 1, c.sequences = pick(1, 6);
        int64_t *cu = allocate<int64_t>(c.sequences + 1);
        cu[0] = 0, cu[c.sequences] = c.L;
        for (int64_t i = 1; i < c.sequences; i++) cu[i] = pick(cu[i - 1], c.L);
        c.cu_seqlens = cu;
    }
    if (stream) c.position = pick(0, 1000);
    const int64_t reach = std::max<int64_t>(c.position + std::max(c.q_offset + c.L, c.S), 1);
    if (chance(70)) {
        double *theta = allocate<double>(c.H);
        for (int64_t h = 0; h < c.H; h++) theta[h] = chance(20) ? 0 : std::acos(-1.0) / 2 / static_cast<double>(reach);
        c.theta = theta;
    }
    if (chance(40)) {
        uint8_t *mask = allocate<uint8_t>(c.B * c.S);
        for (int64_t i = 0; i < c.B * c.S; i++) mask[i] = chance(70);
        c.mask = mask, c.mask_stride[0] = c.S, c.mask_stride[1] = 1;
    }
    if (chance(50)) {
        c.decay_per_position = !cross && chance(60);
        int64_t count = c.decay_per_position ? c.B * c.H * c.S : c.H;
        float *rates = allocate<float>(count);
        for (int64_t i = 0; i < count; i++) rates[i] = static_cast<float>(std::pow(10.0, uniform() * 3.6 - 2.3));
        c.decay = rates;
        c.decay_stride[0] = c.H * c.S, c.decay_stride[1] = c.decay_per_position ? c.S : 1, c.decay_stride[2] = 1;
        if (c.decay_per_position && c.S == 0) c.decay = nullptr;
    }
    const int64_t F = c.theta ? 2 * c.D : c.D, two_sweeps = c.decay && !c.causal;
    c.q = tensor({c.B, c.H, c.L, c.D}, half, false);
    c.k = tensor({c.B, c.Hk, c.S, c.D}, half, false);
    c.v = tensor({c.B, c.Hk, c.S, c.E}, half, false);
    c.out = tensor({c.B, c.H, c.L, c.E}, two_sweeps ? F32 : half, true);
    c.norm = allocate<float>(c.B * c.H * c.L);
    if (stream && chance(70)) c.state_in = tensor({c.B, c.H, F, c.E + 1}, F32, false, true);
    if (!packed && !two_sweeps && (stream || !c.causal)) c.state_out = tensor({c.B, c.H, F, c.E + 1}, F32, true, true);
    c.signed_norm = !c.relu && chance(50);
    if (!c.relu) c.eps = 1;  // signed features: keep the quotient tame
    if (chance(30) && !two_sweeps) {  // the same by its places, into the state that came in where there is one
        cosformer_call like = c;
        like.q.data = like.k.data = like.v.data = like.out.data = like.state_in.data = like.state_out.data = nullptr;
        like.norm = nullptr, like.mask = nullptr, like.decay = nullptr, like.threads = 1, like.position = 0;
        void *after = c.L == 1 && c.state_in.data ? c.state_in.data : c.state_out.data;
        if (after == c.state_in.data && after) like.state_out = c.state_in;
        if (!c.causal && chance(50)) after = nullptr;  // nobody wants it, and a short sequence goes without
        cosformer_places places = {c.q.data, c.k.data, c.v.data, c.out.data, nullptr, const_cast<float *>(c.decay),
                                   const_cast<uint8_t *>(c.mask), c.state_in.data, after, c.position, c.threads};
        if (cosformer_forward(&like, &places)) return false;
    }
    if (cosformer_forward(&c, nullptr)) return false;
    bool good = finite(c.out, {c.B, c.H, c.L, c.E});

    const int64_t key_grad = two_sweeps || c.H != c.Hk ? F32 : half;
    g.dout = tensor({c.B, c.H, c.L, c.E}, half, false);
    g.dq = tensor({c.B, c.H, c.L, c.D}, c.causal || two_sweeps ? F32 : half, true);
    g.dk = tensor({c.B, c.H, c.S, c.D}, key_grad, true);
    g.dv = tensor({c.B, c.H, c.S, c.E}, key_grad, true);
    if (c.state_in.data) g.dstate_in = tensor({c.B, c.H, F, c.E + 1}, F32, true, true);
    if (stream && c.state_out.data && chance(70)) g.dstate_out = tensor({c.B, c.H, F, c.E + 1}, F32, false, true);
    if (c.decay) {
        int64_t count = c.B * c.H * std::max(c.q_offset + c.L, c.S);
        g.dA = allocate<double>(count);
        std::fill_n(g.dA, count, 0.0);
        g.ddecay = allocate<double>(c.B * c.H * (c.decay_per_position ? c.S : std::max<int64_t>(c.sequences, 1)));
    }
    cosformer_places places = {c.q.data, c.k.data, c.v.data, c.out.data, c.norm, const_cast<float *>(c.decay),
                               const_cast<uint8_t *>(c.mask), c.state_in.data, c.state_out.data, c.position, c.threads};
    cosformer_grad_places grads = {g.dout.data, g.dq.data, g.dk.data, g.dv.data, g.dstate_out.data, g.dstate_in.data, g.dA, g.ddecay};
    if (c.L && cosformer_backward(&c, &g, &places, &grads)) return false;
    good = good && (!c.L || finite(g.dq, {c.B, c.H, c.L, c.D}));
    if (!good)
        std::printf("not finite: L %ld S %ld D %ld E %ld causal %ld relu %ld dtype %ld\n", c.L, c.S, c.D, c.E, c.causal, c.relu, half);
    return good;
}

float *numbers(int64_t count, float scale = 1) {
    float *p = allocate<float>(count);
    for (int64_t i = 0; i < count; i++) p[i] = scale * uniform();
    return p;
}

// A token through random blocks.
bool one_step() {
    blocks.clear();
    const int64_t dtype = one_of({F32, BF16});
    auto parameters = [&](int64_t count, float scale = 1) -> void * {
        if (dtype == F32) return numbers(count, scale);
        uint16_t *p = allocate<uint16_t>(count);
        for (int64_t i = 0; i < count; i++) p[i] = bf16(scale * uniform());
        return p;
    };
    const int64_t B = pick(1, 4), C = chance(30) ? pick(128, 160) : pick(1, 60), count = pick(1, 3), position = pick(0, 100);
    std::vector<cosformer_block> stack(count);
    std::vector<cosformer_kept> kept(count);
    for (int64_t i = 0; i < count; i++) {
        cosformer_block &b = stack[i];
        b.kv_heads = pick(1, 3), b.heads = b.kv_heads * pick(1, 2), b.size = chance(90) ? pick(1, 24) : pick(1, 256), b.hidden = pick(1, 50);
        b.conv_width = chance(70) ? pick(2, 6) : 0, b.relu = chance(80), b.signed_norm = !b.relu && chance(50);
        b.eps = b.relu ? 1e-6 : 1, b.norm_eps = b.qk_norm_eps = 1e-6, b.largest_exponent = 20;
        auto linear = [&](int64_t rows, int64_t columns) {
            void *bias = chance(50) ? parameters(rows) : nullptr;
            if (chance(70)) return cosformer_linear{parameters(rows * columns, 0.3f), bias, nullptr, rows};
            int8_t *bytes = allocate<int8_t>(rows * columns);
            for (int64_t n = 0; n < rows * columns; n++) bytes[n] = static_cast<int8_t>(127 * uniform());
            return cosformer_linear{bytes, bias, numbers(rows, 0.003f), rows};
        };
        const int64_t q = b.heads * b.size, kv = b.kv_heads * b.size, channels[3] = {q, kv, kv};
        b.norm = parameters(C), b.mlp_norm = parameters(C);
        b.q = linear(q, C), b.k = linear(kv, C), b.v = linear(kv, C), b.o = linear(C, q);
        b.gate = linear(b.hidden, C), b.up = linear(b.hidden, C), b.down = linear(C, b.hidden);
        if (chance(50)) b.q_norm = parameters(b.size), b.k_norm = parameters(b.size);
        if (chance(50)) b.output_gate = linear(q, C);
        if (chance(60)) {
            float *rates = numbers(b.heads);
            for (int64_t h = 0; h < b.heads; h++) rates[h] = std::fabs(rates[h]);
            b.rates = rates;
            if (chance(60)) b.rate_gate = linear(b.heads, C);
        }
        if (chance(70)) {
            double *theta = allocate<double>(b.heads);
            for (int64_t h = 0; h < b.heads; h++) theta[h] = 0.01;
            b.theta = theta;
        }
        if (chance(30)) {
            b.softmax = 1, kept[i].room = position + pick(1, 20);
            const int64_t count = B * b.heads * kept[i].room * b.size;
            kept[i].keys = parameters(count), kept[i].values = parameters(count);
            if (b.size > 1 && chance(50)) {
                double *turns = allocate<double>(b.size / 2);
                for (int64_t d = 0; d < b.size / 2; d++) turns[d] = 0.1;
                b.turns = turns;
            }
        } else {
            kept[i].state = numbers(B * b.heads * b.size * (b.theta ? 2 : 1) * (b.size + 1));
        }
        for (int p = 0; p < 3 && b.conv_width; p++)
            b.conv[p] = parameters(channels[p] * b.conv_width), kept[i].last[p] = parameters(B * (b.conv_width - 1) * channels[p]);
    }
    float *x = numbers(B * C);
    cosformer_ends ends = {};
    int64_t *ids = nullptr, *places = nullptr;
    float *logits = nullptr;
    if (chance(60)) {
        ends.vocabulary = pick(1, 30), ends.embeddings = parameters(ends.vocabulary * C), ends.norm = parameters(C), ends.norm_eps = 1e-6;
        const int64_t rows = pick(1, 30);
        ends.head = {parameters(rows * C), chance(50) ? parameters(rows) : nullptr, nullptr, rows};
        if (chance(70)) logits = numbers(B * rows);
        if (chance(70)) {
            ids = allocate<int64_t>(B);
            for (int64_t b = 0; b < B; b++) ids[b] = pick(0, ends.vocabulary - 1);
            if (chance(50)) {
                ends.most = pick(1, 30), ends.positions = parameters(ends.most * C), places = allocate<int64_t>(B);
                for (int64_t b = 0; b < B; b++) places[b] = pick(0, ends.most - 1);
            }
            if (chance(10)) {
                (places && chance(50) ? places : ids)[B - 1] = chance(50) ? -1 : 30;
                return cosformer_step(stack.data(), kept.data(), count, dtype, x, B, C, position, pick(1, 3), &ends, ids, places, logits) == 3;
            }
        }
    }
    return cosformer_step(stack.data(), kept.data(), count, dtype, x, B, C, position, pick(1, 3), &ends, ids, places, logits) == 0;
}

}  // namespace

int main(int argc, char **argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 25;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const auto start = std::chrono::steady_clock::now();
    uint64_t calls = 0;
    for (; std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds; calls++) {
        rng.seed(seed * 1000003 + calls);
        if (!(calls % 4 ? one_call() : one_step())) {
            std::printf("failed at call %lu of seed %lu\n", calls, seed);
            return 1;
        }
    }
    std::printf("%lu calls, clean\n", calls);
}
