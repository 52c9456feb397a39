// The angles of a chunk's positions: cos and sin of theta * i, from a table of the first ones.
#pragma once

#include <cmath>
#include <cstdint>

namespace {

struct Angles {
    double *cosine = nullptr, *sine = nullptr;  // of theta * i

    // By repeated rotation: in double, a chunk's steps lose no accuracy that matters.
    void turn(double theta, int64_t count) {
        const double c = std::cos(theta), s = std::sin(theta);
        cosine[0] = 1, sine[0] = 0;
        for (int64_t i = 1; i < count; i++) {
            cosine[i] = cosine[i - 1] * c - sine[i - 1] * s;
            sine[i] = sine[i - 1] * c + cosine[i - 1] * s;
        }
    }

    // cos and sin of n positions, the first at `angle`.
    void from(double angle, int64_t n, float *__restrict cosines, float *__restrict sines) const {
        const double c = std::cos(angle), s = std::sin(angle);
        for (int64_t i = 0; i < n; i++) cosines[i] = static_cast<float>(c * cosine[i] - s * sine[i]);
        for (int64_t i = 0; i < n; i++) sines[i] = static_cast<float>(s * cosine[i] + c * sine[i]);
    }
};

}  // namespace
