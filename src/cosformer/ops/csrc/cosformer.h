/* The C interface of the cosformer kernel, and the mathematics behind it.
 *
 * For one head, with f(x) = relu(x) (or x), a key at position j and a query at position i,
 *
 *     s_ij = f(q_i).f(k_j) * cos(theta (i - j)) * exp(-|A_i - A_j|)       A: running sum of the decay rates
 *     out_i = sum_j s_ij v_j / max(z_i, eps)                              z_i = sum_j s_ij
 *
 * over the unmasked keys, and only j <= i when causal.
 *
 * One token as two vectors.  cos(a - b) = cos a cos b + sin a sin b, so with phi(x) = [f(x) cos(theta i), f(x) sin(theta i)]
 * (F = 2D numbers; just f(x), F = D, without a cosine) the weight is phi(q_i).phi(k_j) times the decay.  A key brings the pair
 * phi(k_j), y_j = [v_j, 1], whose last entry counts the weight itself, so that the normaliser is one more value column.
 *
 * The state is the (E+1, F) matrix  S = sum_j decay * y_j phi(k_j)^T.  Three products make everything:
 *
 *     push   S += y phi^T         a key enters the state
 *     read   y  = S phi           a query takes its numerators and its normaliser out
 *     pull   dphi = S^T dy        the gradient of phi, from that of the read value
 *
 * Forward, chunk by chunk.  Let a chunk hold the positions 0..n-1 with rates l_t, before_i = exp(-(l_0 + .. + l_i)) and
 * after_i = exp(-(l_{i+1} + .. + l_{n-1})).  Coming from the left with the state S of all earlier keys,
 *
 *     y_i = before_i S phi(q_i)  +  sum_{j <= i in the chunk} s_ij [v_j, 1]
 *     S  <- before_{n-1} S  +  sum_j after_j [v_j, 1] phi(k_j)^T
 *
 * where s_ij within the chunk is computed as written, with D features and a small table of weights.  Without causality the
 * mirror image comes from the right: the same two lines with `before` and `after` exchanged.  All factors are <= 1: nothing
 * can overflow.  Without decay and causality the two directions collapse into one total state.
 *
 * Backward is the same machine with the roles exchanged.  The gradient of the read row y_i = [num_i, z_i] is
 * dy_i = [dout_i / max(z_i, eps), -(out_i . dout_i) / z_i] (last entry 0 where the clamp is active).  Then ds_ij = dy_i.[v_j, 1] and
 *
 *     dphi(q_i) = pull of dy_i from S          (S recomputed, swept as in the forward)
 *     T = sum_i decay * dy_i phi(q_i)^T        the mirrored state: queries push, keys read; swept from the other side
 *     dphi(k_j) = pull of [v_j, 1] from T,     dv_j = read of phi(k_j) from T
 *
 * plus the chunk's own pairs.  T starts from the gradient of the outgoing state and ends as the gradient of the incoming one.
 *
 * Decay.  A enters only through exp(-|A_i - A_j|), so with P_ij = ds_ij s_ij and g = sign(i - j):
 * dA_i -= sum_j g P_ij (as a query), dA_j += sum_i g P_ij (as a key).  Across chunks these sums are f(x_i).dx_i of the pulls above;
 * within a chunk they are taken pair by pair, so that a strong decay does not drown in the diagonal.  The rate at t moves
 * every A_i, i >= t: its gradient is the reversed running sum of dA.
 *
 * Masked keys are replaced by zeros when loaded (never multiplied by zero), so a NaN in padding reaches nothing.
 */
#ifndef COSFORMER_H
#define COSFORMER_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))  /* of the definitions of the functions below */

#ifdef __cplusplus
extern "C" {
#endif

enum { COSFORMER_F32 = 0, COSFORMER_BF16 = 1, COSFORMER_F16 = 2 };

/* A tensor (batch, head, row, column); strides count elements and may be zero.  A missing tensor has data == NULL. */
typedef struct {
    void *data;
    int64_t dtype;
    int64_t stride[4];
} cosformer_tensor;

/* Every field is 8 bytes wide, so a caller can build the struct as one packed buffer. */
typedef struct {
    int64_t B, H, Hk, L, S, D, E;  /* q (B,H,L,D)  k (B,Hk,S,D)  v (B,Hk,S,E), H % Hk == 0 */
    int64_t causal, relu;
    int64_t signed_norm;           /* z may be negative: keep its sign, and clamp its magnitude */
    int64_t q_offset;              /* query i stands at position q_offset + i, key j at position j */
    int64_t position;              /* absolute position of the first key: only the angles need it */
    int64_t threads;
    double eps;
    const double *theta;           /* (H,) radians per position, or NULL: no cosine, F = D */
    int64_t sequences;             /* packed sequences (then B == 1, L == S), or 0 */
    const int64_t *cu_seqlens;     /* (sequences + 1,) */
    const uint8_t *mask;           /* (B, S), nonzero = the key is seen, or NULL */
    int64_t mask_stride[2];
    const float *decay;            /* rates (H,) or, per position, (B,H,S); or NULL */
    int64_t decay_per_position;
    int64_t decay_stride[3];
    cosformer_tensor q, k, v;
    cosformer_tensor out;          /* (B,H,L,E); float32 for a bidirectional call with decay (it is added to) */
    float *norm;                   /* (B,H,L) contiguous: z before the clamp; NULL if one sweep suffices and nobody reads it */
    cosformer_tensor state_in;     /* (B,H,F,E+1) float32, last stride 1; the state before the first key */
    cosformer_tensor state_out;    /* same; after the last key (causal) or with all keys (bidirectional without decay) */
} cosformer_call;

/* What changes between calls with the same shapes, strides, dtypes and options: the addresses of the tensors (NULL if missing) and a few
 * numbers.  They replace the fields of cosformer_call with the same names. */
typedef struct {
    void *q, *k, *v, *out, *norm, *decay, *mask, *state_in, *state_out;  /* state_out may be state_in, for a stream's next token */
    int64_t position, threads;
} cosformer_places;

/* The same for the fields of cosformer_grads. */
typedef struct {
    void *dout, *dq, *dk, *dv, *dstate_out, *dstate_in, *dA, *ddecay;
} cosformer_grad_places;

/* dq, dk, dv have one head per QUERY head (the caller sums groups).  dq must be float32 when causal or with decay,
 * dk and dv when bidirectional with decay: two sweeps add into them. */
typedef struct {
    cosformer_tensor dout, dq, dk, dv;
    cosformer_tensor dstate_out, dstate_in;
    double *dA;                    /* workspace (B,H,T) zeros, T = max(q_offset + L, S); NULL = no decay gradient wanted */
    double *ddecay;                /* per position (B,H,S), else (B,H,max(sequences, 1)): one number per head and sequence */
} cosformer_grads;

/* A short depthwise convolution along the rows of x (B, 1, L, C), y_t = sum_s w_s x_(t + ahead - s), where tokens outside t's own
 * sequence are zero.  The gradient of x is the convolution of dout with the taps reversed and ahead = width - 1 - ahead; for that of the
 * weight, pass dout as y. */
typedef struct {
    int64_t B, L, C, width, ahead, threads;
    int64_t sequences;             /* packed sequences (then B == 1), or 0 */
    const int64_t *cu_seqlens;     /* (sequences + 1,) */
    cosformer_tensor x, y;         /* (B, 1, L, C); y is dout where dweight is not NULL */
    const float *weight;           /* (width, C) */
    float *dweight;                /* (threads, width, C): parts that the caller adds up; or NULL */
} cosformer_convolution_call;

int cosformer_convolution(const cosformer_convolution_call *call);

/* The RMS norm of rows, y = w x / sqrt(mean(x^2) + eps), where x is (1, 1, rows, D); with dweight, its gradients instead. */
typedef struct {
    int64_t rows, D, threads;
    double eps;
    const float *weight;           /* (D,) */
    cosformer_tensor x, y;
    cosformer_tensor dy, dx;
    float *dweight;                /* (threads, D): parts that the caller adds up; or NULL */
} cosformer_norm_call;

int cosformer_norm(const cosformer_norm_call *call);

/* One token per row through whole blocks of a decoder, summed in float32: with n the RMS norm of x,
 *
 *     x += o(mixed(conv(q n), conv(k n), conv(v n)))  mixed: q and k normed, the stream's next token as above, times the output gate
 *     x += down(silu(gate n) * up n)
 *
 * Parts that a block lacks are NULL, or have 0 rows.  Parameters and kept tokens, void here, are all float32 or all bfloat16; but weights
 * with scales are int8. */
typedef struct {
    const void *weight, *bias;     /* (rows, columns), (rows,) */
    const float *scales;           /* (rows,) by which int8 weights are multiplied, or NULL */
    int64_t rows;
} cosformer_linear;

typedef struct {
    int64_t heads, kv_heads, size, hidden, conv_width, relu, signed_norm;
    int64_t softmax;               /* attend over the kept keys and values; no state, no rates */
    double eps, norm_eps, qk_norm_eps, largest_exponent;
    const void *norm, *mlp_norm, *q_norm, *k_norm;
    cosformer_linear q, k, v, o, gate, up, down, rate_gate, output_gate;
    const void *conv[3];           /* of q, k, v: (channels, width), the newest token first */
    const float *rates;            /* (heads,), times exp(min(rate_gate n, largest_exponent)) if there is that gate */
    const double *theta;           /* (heads,) or NULL: no cosine */
    const double *turns;           /* for softmax with rotary positions: (size / 2,) radians per position; or NULL */
} cosformer_block;

/* What a block keeps of a stream; all of it is changed in place. */
typedef struct {
    float *state;                  /* (B, heads, F, size + 1) contiguous */
    void *last[3];                 /* q, k, v before the convolution: (B, width - 1, channels) contiguous, the newest token last */
    void *keys, *values;           /* for softmax: (B, heads, room, size), filled with the tokens so far, fewer than room */
    int64_t room;
} cosformer_kept;

/* The parts before and after the blocks of a language model: x = embeddings[ids] + positions[places], logits = head n. */
typedef struct {
    const void *embeddings;        /* (vocabulary, C) */
    int64_t vocabulary;
    const void *positions;         /* (most, C), or NULL */
    int64_t most;
    const void *norm;
    double norm_eps;
    cosformer_linear head;
} cosformer_ends;

/* x (B, C) is the input, or is made from ids (B,) and, if positions are learned, places (B,); it is overwritten with the output.
 * logits (B, head.rows) or NULL. */
int cosformer_step(const cosformer_block *blocks, const cosformer_kept *kept, int64_t count, int64_t dtype, float *x, int64_t B, int64_t C,
                   int64_t position, int64_t threads, const cosformer_ends *ends, const int64_t *ids, const int64_t *places, float *logits);

/* These return 0; or, with a meaningless output, 1 when memory ran out, 2 when a decay rate is negative, infinite or NaN, and 3 when a
 * table has no such row (then no stream is changed).  If places are NULL, the addresses in the call itself are used. */
int cosformer_forward(const cosformer_call *call, const cosformer_places *places);
int cosformer_backward(const cosformer_call *call, const cosformer_grads *grads, const cosformer_places *places,
                       const cosformer_grad_places *grad_places);

/* Fresh memory, all of it about to be written: the system may use huge pages for it. */
void cosformer_expect(void *data, int64_t bytes);

/* Does this CPU run the instruction set ("baseline", "avx2", "avx512", "avx512bf16", "neon")? */
int cosformer_cpu_supports(const char *isa);

/* A hash of the sizes of the structs, so that a caller with other structs finds out at load time. */
int64_t cosformer_abi(void);

#ifdef __cplusplus
}
#endif
#endif
