"""Layers with a state in parallel form: dense matrices over the rows, and no loop that carries a state.

They are written from the papers, independently of the loops of `attncheck.reference`. Tests compare the two.

Rows t = 1..T are one sequence; every tensor is float64. The axes are T rows, H heads, K key size, V value
size, N state size, P head size, G groups, D channels. ``log_decay`` is the logarithm of the factor by which
the state is multiplied before the row's own key and value enter it: 0 or negative, and -inf to forget all. Each
function returns the outputs of the rows, and the state after the last row.

    Mamba           Gu and Dao, arXiv 2312.00752
    Mamba-2         Dao and Gu, arXiv 2405.21060
    Lightning       Qin et al., arXiv 2401.04658 (Lightning Attention-2)
    DeltaNet        Yang et al., arXiv 2406.06484
    Gated DeltaNet  Yang et al., arXiv 2412.06464
    Kimi Linear     Kimi Team, arXiv 2510.26692
"""

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor]


def scan_matrix_mamba1(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> Result:
    """Return (y [T, D], state [D, N]) of Mamba's selective scan, without skip connection and gate.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t;  y_t = C_t . h_t        Mamba, eq. 2 and algorithm 2

    Each channel is one matrix, M_ti = C_t exp(A (dt_{i+1} + .. + dt_t)) B_i dt_i (Mamba-2, eq. 3).
    Mamba's eq. 4, the zero-order hold, has another factor of B. Its published kernels compute dt B, the first
    order of that factor, and so does this.

    x, dt [T, D], dt after its bias and softplus; A [D, N], negative; B, C [T, N]; state [D, N].
    """
    left = _log_decay_between(dt[:, :, None] * A).exp()
    matrices = torch.einsum("tn,tidn,in,id->dti", C, left[1:, 1:], B, dt)
    of_rows = torch.einsum("dti,id->td", matrices, x)
    of_initial_state = torch.einsum("tn,tdn,dn->td", C, left[1:, 0], state)
    entered = torch.einsum("idn,id,in,id->dn", left[-1, 1:], dt, B, x)
    return of_rows + of_initial_state, left[-1, 0] * state + entered


def ssd_matrix(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> Result:
    """Return (y [T, H, P], state [H, P, N]) of Mamba-2, without skip connection and gate.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t
    Y = (L o C B^T) (dt X), o being the product of entries        Mamba-2, eq. 16

    x [T, H, P]; dt [T, H] after its bias and softplus; A [H], negative; B, C [T, G, N]; state [H, P, N].
    Head h uses group h // (H // G).
    """
    heads_per_group = x.shape[1] // B.shape[1]
    keys = B.repeat_interleave(heads_per_group, dim=1)
    queries = C.repeat_interleave(heads_per_group, dim=1)
    return _decayed_attention(queries, keys, dt[:, :, None] * x, _for_each_key(dt * A, keys), state)


def linear_matrix(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Result:
    """Return (o [T, H, V], state [H, V, K]) of linear attention with one decay per head.

    S_t = exp(log_decay) S_{t-1} + v_t k_t^T;  o_t = S_t q_t        Lightning, eq. 3 and 4

    q, k [T, H, K], q scaled; v [T, H, V]; log_decay [H]; state [H, V, K].
    """
    of_rows = log_decay.expand(k.shape[0], -1)
    return _decayed_attention(q, k, v, _for_each_key(of_rows, k), state)


def gated_delta_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
) -> Result:
    """Return (o [T, H, V], state [H, V, K]) of the gated delta rule.

    S_t = S_{t-1} (exp(log_decay_t) (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T        Gated DeltaNet, eq. 10
    o_t = S_t q_t

    The correction subtracts what the decayed state returns for the key: a number commutes with the matrix.

    q, k [T, H, K], q scaled; v [T, H, V]; log_decay, beta [T, H]; state [H, V, K].
    """
    return kda_matrix(q, k, v, _for_each_key(log_decay, k), beta, state)


def kda_matrix(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Result:
    """Return (o [T, H, V], state [H, V, K]) of Kimi delta attention.

    S_t = S_{t-1} Diag(exp(log_decay_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        Kimi Linear, eq. 1
    o_t = S_t q_t

    The paper's S is the transpose. The decay comes first: the correction applies to the decayed state.

    q, k [T, H, K], q scaled; v [T, H, V]; log_decay [T, H, K]; beta [T, H]; state [H, V, K].
    """
    return _decayed_attention(q, k, _corrected_values(k, v, log_decay, beta, state), log_decay, state)


def _corrected_values(k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Return u [T, H, V], with which the delta rule is S_t = S_{t-1} Diag(exp(log_decay_t)) + u_t k_t^T.

    u_t is beta_t times (v_t less what the decayed state returns for k_t). That state consists of the initial
    one and of u_1..u_{t-1}. So all rows are one unit lower triangular system. This is the UT transform of
    DeltaNet, of Gated DeltaNet, section 3.3, and of Kimi Linear, eq. 5 to 7.
    """
    left = _log_decay_between(log_decay).exp()
    earlier_rows = torch.einsum("thc,tihc,ihc->hti", k, left[1:, 1:], k).tril(-1)
    initial_state = torch.einsum("thc,thc,hvc->htv", k, left[1:, 0], state)

    beta_of_head = beta.T[:, :, None]
    system = torch.eye(k.shape[0], dtype=k.dtype) + beta_of_head * earlier_rows
    right_side = beta_of_head * (v.transpose(0, 1) - initial_state)
    return torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True).transpose(0, 1)


def _decayed_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Result:
    """Return (o [T, H, V], state [H, V, K]) of linear attention with a decay for each row and key component.

    S_t = S_{t-1} Diag(exp(log_decay_t)) + v_t k_t^T;  o_t = S_t q_t

    o_t is the sum over i <= t of (q_t^T Diag(decay from i to t) k_i) v_i, and what q_t reads of the initial
    state: Gated DeltaNet, section 2.1, but with log_decay [T, H, K].
    """
    left = _log_decay_between(log_decay).exp()
    scores = torch.einsum("thc,tihc,ihc->hti", q, left[1:, 1:], k)
    of_rows = torch.einsum("hti,ihv->thv", scores, v)
    of_initial_state = torch.einsum("thc,thc,hvc->thv", q, left[1:, 0], state)
    entered = torch.einsum("ihc,ihc,ihv->hvc", left[-1, 1:], k, v)
    return of_rows + of_initial_state, left[-1, 0][:, None] * state + entered


def _log_decay_between(log_decay: Tensor) -> Tensor:
    """Return [T + 1, T + 1, ...]: at [t, i], log_decay [T, ...] summed over rows i + 1..t, or -inf if t < i.

    Its exponential is L of Mamba-2, eq. 6, and Gamma of Gated DeltaNet, section 2.1. Column 0 belongs to the
    initial state.

    Each entry is a sum of its own. A difference of two cumulative sums loses digits under strong decay, and
    is NaN after a row whose log_decay is -inf.
    """
    per_row = torch.cat([log_decay.new_zeros(1, *log_decay.shape[1:]), log_decay])
    rows = torch.arange(len(per_row)).view(-1, 1, *[1] * (log_decay.dim() - 1))
    columns = rows.transpose(0, 1)
    summands = per_row[:, None].expand(-1, len(per_row), *per_row.shape[1:])
    sums = summands.masked_fill(rows <= columns, 0.0).cumsum(0)
    return sums.masked_fill(rows < columns, -torch.inf)


def _for_each_key(log_decay: Tensor, k: Tensor) -> Tensor:
    """Return log_decay [T, H] repeated for each component of the keys [T, H, K]."""
    return log_decay[:, :, None].expand_as(k)
