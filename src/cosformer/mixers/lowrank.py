"""Low-rank mixers: softmax's N x N matrix through a few projected keys, or through a few landmarks.

    linformer    softmax(q (E k)^T) (F v)      E, F (rank, max_length), learned
    nystrom      softmax(q K^T) softmax(Q K^T)^+ softmax(Q k^T) v      Q, K (m, D), means over m segments

Scores are divided by sqrt(D) throughout; ^+ is the pseudo-inverse.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Mixer, Sizes, register
from .blocks import full_precision
from .keys import all_kept


@register("linformer")
class Linformer(Mixer):
    """Linformer (Wang et al., 2020, arXiv:2006.04768): keys and values projected to `rank` rows, O(N rank).

    `rank` is 256, or max_length if that is less. E and F are shared by the heads. They have a column for each
    of max_length positions: a shorter source counts as padded with zeros, a longer one is refused.
    """

    causal = "every projected key is a mixture of all positions, later ones too"
    left_padding = (
        "each position has its own column of the projections, counted from the first place of a row"
    )

    def __init__(self, sizes: Sizes, *, rank: int | None = None):
        super().__init__(sizes)
        longest = sizes.max_length
        rank = min(256, longest) if rank is None else rank
        if not 1 <= rank <= longest:
            raise ValueError(f"rank must be 1 to max_length = {longest}; got {rank}")
        # Scaled to keep vector lengths on average (Johnson-Lindenstrauss).
        self.E, self.F = (nn.Parameter(torch.randn(rank, longest) * rank**-0.5) for _ in range(2))

    def mix(self, q, k, v, *, x, causal, key_mask):
        S = k.shape[2]
        if S > self.max_length:
            raise ValueError(f"linformer projects max_length = {self.max_length} keys; got k of length {S}")
        return F.scaled_dot_product_attention(q, self.E[:, :S].to(k.dtype) @ k, self.F[:, :S].to(v.dtype) @ v)


@register("nystrom")
class Nystrom(Mixer):
    """Nystromformer (Xiong et al., 2021, arXiv:2102.03902): O(N landmarks), and a convolution of the values.

    The pseudo-inverse is `iterations` steps of a third-order Newton-Schulz scheme, scaled for each matrix
    alone (the released code scales by a maximum over the batch, so rows depend on one another). Segments
    divide each row's own tokens as evenly as possible, so padding moves no landmark; a row with fewer tokens
    than landmarks has as many landmarks as tokens.

    conv    the convolution's width, odd; None for none
    """

    causal = "its landmarks are means over the whole sequence"
    cross = "queries and keys share the segments of one sequence"

    def __init__(self, sizes: Sizes, *, landmarks: int = 64, iterations: int = 6, conv: int | None = 35):
        super().__init__(sizes)
        if landmarks < 1 or iterations < 1:
            raise ValueError(f"landmarks and iterations must be at least 1; got {landmarks} and {iterations}")
        if conv is not None and (conv < 1 or conv % 2 == 0):
            raise ValueError(f"conv must be None or an odd width; got {conv}")
        self.landmarks, self.iterations = landmarks, iterations
        self.conv = None
        if conv is not None:
            H = sizes.heads
            self.conv = nn.Conv2d(H, H, (conv, 1), padding=(conv // 2, 0), groups=H, bias=False)

    def mix(self, q, k, v, *, x, causal, key_mask):
        with full_precision(q.device.type):  # the iterated inverse needs the precision
            return self._mix(q, k, v, key_mask)

    def _mix(self, q, k, v, key_mask):
        dtype = torch.promote_types(q.dtype, torch.float32)
        a, b, u = (t.to(dtype) for t in (q, k, v))
        kept = all_kept(k, key_mask)
        a = a.masked_fill(~kept[:, None, :, None], 0)  # queries enter landmarks, too
        mean, used = self._segments(kept)
        mean = mean.to(dtype)
        Q, K = mean @ a, mean @ b  # (B, H, m, D)
        used, kept = used[:, None, None], kept[:, None, None]
        left, middle, right = _softmax(a, K, used), _softmax(Q, K, used), _softmax(Q, b, kept)
        unused = ~used.squeeze(2)[..., None] & torch.eye(used.shape[-1], dtype=torch.bool, device=q.device)
        middle = torch.where(used.mT, middle, unused.to(dtype))  # an unused landmark is its own inverse
        out = left @ (self._inverse(middle) @ (right @ u))
        if self.conv is not None:
            # Along the last axis: along the one before it oneDNN's gradient of the weight is wrong at some
            # lengths (46, 47, 61 ... 256, 512) in float32.
            taps, around = self.conv.weight.to(dtype).mT, self.conv.padding[::-1]
            out = out + F.conv2d(u.mT, taps, padding=around, groups=self.heads).mT
        return out.to(q.dtype)

    def _segments(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix (B, 1, m, N) that averages kept tokens over segments, and which m are used (B, m)."""
        count = kept.sum(-1, keepdim=True)
        m = count.clamp(max=self.landmarks)
        segment = (kept.cumsum(-1) - 1) * m // count.clamp_min(1)  # token r of n lies in floor(r m / n)
        number = torch.arange(min(self.landmarks, kept.shape[1]), device=kept.device)[:, None]
        member = ((segment[:, None] == number) & kept[:, None]).float()
        return (member / member.sum(-1, keepdim=True).clamp_min(1))[:, None], number.T < m

    def _inverse(self, A: Tensor) -> Tensor:
        """The pseudo-inverse: Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from A^T / (|A|_1 |A|_inf)."""
        one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        norms = A.abs().sum(-2).amax(-1) * A.abs().sum(-1).amax(-1)
        Z = A.mT / norms.clamp_min(torch.finfo(A.dtype).tiny)[..., None, None]
        for _ in range(self.iterations):
            AZ = A @ Z
            Z = Z @ (13 * one - AZ @ (15 * one - AZ @ (7 * one - AZ))) / 4
        return Z


def _softmax(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    """Softmax of the scores over allowed keys, zeros if there are none."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(~allowed, 0)
