"""What a client sends where bytes are saved: codes of changes in the place of parameters, and what waits at home.

Compressed are the parameters of units that a client started from as it received them: only there is what it sends a
step from something that the server knows, and only of steps can a part wait. Running statistics, a method's state
(control variates, scores), and units that a client chose, mixed or moved towards only in part travel as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedquilt.families.layout import Layout
from fedquilt.interface.messages import Instructions, Update
from fedquilt.interface.method import Method
from fedquilt.interface.passed import start_of
from fedquilt.interface.steps import Install
from fedquilt.privacy import Privacy
from fedquilt.secure import SecureSums
from fedquilt.sharing.compression import Code, Compression


def check(how: Compression, method: Method, privacy: Privacy | None, secure: SecureSums | None) -> None:
    """Refuse, before any work, what compression does not go with, and what it does nothing for."""
    if how != Compression() and not method.sends_parameters:
        raise ValueError(
            f"{settings_of(how)} would do nothing: only parameters of models are compressed, and units of the method "
            f"'{method.name}' hold none; leave it out"
        )
    if privacy is not None and privacy.level in ("client", "distributed") and how != Compression():
        raise ValueError(
            f"compress with dp.level={privacy.level}: noise is for changes of the length dp.clip, and what waited or "
            "was rounded makes them longer; leave compress out, or take dp.level=local or sample, whose noise is in "
            "before anything is compressed"
        )
    if how.codes and secure is not None:
        raise ValueError(
            f"compress.up={how.up}: secure sums add up numbers of secure.bits={secure.bits} bits under masks, whatever "
            "they were rounded to; leave it out, or save bytes with secure.bits=32"
        )
    if how.codes and Install() not in method.local():
        raise ValueError(
            f"compress.up={how.up}: clients of '{method.name}' do not start from what they receive as it is, so there "
            "is no step to compress; leave it out (compress.down=float16 goes)"
        )


def settings_of(how: Compression) -> str:
    """What was asked for, as users write it.

    >>> settings_of(Compression("topk", "float16"))
    'compress.up=topk compress.down=float16'
    """
    return " ".join(f"compress.{key}={value}" for key, value in how.text.items() if key != "kept")


def compressed(up: Update, down: Instructions, layout: Layout, how: Compression, rows: Tensor | None) -> Update:
    """An update as its codes say it. What they leave out waits in the clients' rows (k, width), in place; without rows
    nothing has waited, and nothing does."""
    ahead, blocks, codes, coded = layout.width - layout.waiting, [], dict[str, Code](), dict[str, Tensor | None]()
    for block in up.blocks:
        value, first = block.value.clone(), 0
        at = None if block.places is None else block.places.to(value.device)
        for unit, size in zip(block.units, block.sizes, strict=True):
            found, place = start_of(down, unit), layout.learned.get(unit)
            if found is not None and place is not None:
                n = place[1] - place[0]
                mine, start = value[:, first : first + n], found[0].to(value.device)[:, :n]
                start = start if at is None else start[at]
                left = None if rows is None else rows[:, ahead + place[0] : ahead + place[1]]
                waited = torch.zeros_like(mine) if left is None else left if at is None else left[at]
                wanted = mine - start + waited
                codes[unit], coded[unit] = how.encode(wanted), found[1]
                said = how.decode(codes[unit], n)
                # of one who sends what is not finite, and is left out, no more waits than before
                here = said.isfinite().all(1, keepdim=True)
                told, rest = start + said, torch.where(here, wanted - said, waited)
                if found[1] is not None:
                    took = found[1].to(value.device)
                    took = (took if at is None else took[at])[:, None]
                    told, rest = torch.where(took, told, mine), torch.where(took, rest, waited)
                mine.copy_(told)
                if left is not None:
                    left.copy_(rest) if at is None else left.index_copy_(0, at, rest)
            first += size
        blocks.append(replace(block, value=value))
    return replace(up, blocks=tuple(blocks), codes=codes, coded=coded)
