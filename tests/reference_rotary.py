"""The rotary encodings `rope` and `joformer` in plain NumPy: from their options to an `encode` for tests/reference.py.

Angles in radians are summed as they stand, the base step with them: no closed form, no turns, no wrapping.
"""

import numpy as np

import reference

ROPE = dict(
    transport="qk",
    form="1d",
    base=10_000.0,
    freq="geometric",
    pairing="half",
    learned=False,
    angle_share_heads=False,
    angle_share_layers=False,
)
JOFORMER = ROPE | dict(
    transport="qkv",
    angle_source="ffn_flow",
    angle_bound="tanh",
    angle_base="rope",
    angle_ln=True,
    accumulate="prefix",
    step_convention="source",
    journey_sign=1,
    v_angles="same",
)
CONTENTLESS = dict(angle_source="position", journey_sign=1, v_angles="same", angle_base="rope")


def frequencies(o, G, D):
    """The published ω [A, G, D/2]: radians a unit of each coordinate."""
    if o["form"] == "1d":
        return np.tile(np.arange(D // 2) if o["freq"] == "integer" else reference.omega(D, o["base"]), (1, G, 1))
    out = np.zeros((2, G, D // 2))
    for g in range(G):
        for plane in range(D // 2):
            half, t = divmod(plane, D // 4)
            magnitude = o["base"] ** (-t / (D // 4))
            phi = np.pi * (g + 0.5) / G + half * np.pi / 2
            axial = (1 - half, half)
            out[:, g, plane] = magnitude * np.array(axial if o["form"] == "axial" else (np.cos(phi), np.sin(phi)))
    return out


def bounded(z, o, p, initial, norm="angle_norm"):
    """δ [L, G or 1, D/2] of raw outputs z [L, K]."""
    if o["angle_bound"] in ("norm", "norm_abs", "norm_freq"):
        z = reference.layer_norm(z, p[norm], eps=1e-6)
    z = z.reshape(len(z), -1, initial.shape[-1])
    size, bent = np.sqrt((initial**2).sum(0)), np.tanh(z)
    of = {"tanh": np.pi * bent, "tanh_freq": size * bent, "norm_freq": size * (1 + bent), "norm_abs": np.abs(z)}
    return of.get(o["angle_bound"], z)


def raw(o, p, first, tokens, h, x, before):
    """z [L, K] of a block; `first` are the encoding's parameters outside the blocks."""
    if o["angle_source"] in ("token_table", "token_mlp"):
        return (first if o["angle_share_layers"] else p)["angle_table"]["embedding"][tokens]
    if o["angle_source"] == "ffn_flow":
        if before is None:
            return first["angle_table"]["embedding"][tokens]
        g, own = before
        return reference.dense(g, own["advance"])
    if o["angle_source"] == "own_mlp":
        return own_mlp(o, p, h, x)
    z = reference.dense(h if o["angle_ln"] else x, p["angle_out"])
    if o["angle_source"] == "templates":
        rows = [p["angle_table"]["embedding"][token].reshape(-1, z.shape[-1]) for token in tokens]
        z = np.array([row[np.argmax(row @ at)] for row, at in zip(rows, z, strict=True)])
    return z


def own_mlp(o, p, h, x):
    given = reference.dense(h if o["angle_ln"] else x, p["angle_in"])
    return reference.dense(reference.gelu(given), p["angle_out"])


def encode(options, params, position, G, D, tokens=None, placed=None, noise=1):
    """`encode` of tests/reference.py. position [L, A]; placed [L] bool, False = no place, the identity frame; noise
    [L, G, D/2] multiplies content angles."""
    name = options["name"]
    o = (JOFORMER if name == "joformer" else ROPE | CONTENTLESS) | options
    first, L = params.get("encoding", {}), len(position)
    initial = frequencies(o, G, D)

    def of_block(layer, p, h, x, before):
        omega = initial
        if o["learned"]:
            omega = (first if o["angle_share_layers"] else p)["freq"]
            omega = omega * (initial != 0) if o["form"] == "axial" else omega
        omega = np.broadcast_to(omega, initial.shape)
        linear = sum(position[:, a, None, None] * omega[a] for a in range(len(omega)))
        angles = np.zeros_like(linear) if o["angle_base"] == "zero" else linear
        if o["angle_source"] != "position":
            delta = bounded(raw(o, p, first, tokens, h, x, before), o, p, initial)
            if o["angle_source"] == "token_mlp":
                delta = delta + p["angle_gate"] * bounded(own_mlp(o, p, h, x), o, p, initial, "angle_norm_mlp")
            delta = delta * noise
            if o["accumulate"] == "none":
                angles = angles + delta
            elif o["accumulate"] == "raster":  # all that is written before, left to right and line by line
                late = o["step_convention"] == "query"
                for t, u in np.ndindex(L, L):
                    comes = list(position[u]) < list(position[t]) or (late and u == t)
                    if comes and (placed is None or placed[u]):
                        angles[t] = angles[t] + delta[u]
            else:  # text at positions 0, 1, 2, …
                step = np.broadcast_to(delta + (omega[0] if o["angle_base"] == "rope" else 0), linear.shape)
                last = 1 if o["step_convention"] == "query" else 0  # the first site that is not summed for t = 0
                angles = np.array([step[: t + last].sum(0) for t in range(L)])

        def frame(angles):
            angles = angles if placed is None else np.where(placed[:, None, None], angles, 0)
            return reference.frames(o["journey_sign"] * angles, o["pairing"])

        here = np.broadcast_to(np.eye(D), (L, G, D, D))
        values = frame(linear if o["v_angles"] == "fixed" else angles) if "v" in o["transport"] else None
        return frame(angles) if "qk" in o["transport"] else here, values, 0

    return of_block
