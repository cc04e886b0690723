//! Where the tokens of a job go in a pool.

use fused_kv_kernels::abi::Status;

use super::rows::{at, note, read_index};
use crate::problem::{Operand, Pool, Problem};

/// Where the rows of one token go.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    /// Whether they are written.
    pub(super) write: bool,
    /// Byte offset of K from the base address of a layer.
    pub(super) k: i64,
    /// Byte offset of V.
    pub(super) v: i64,
}

/// Slot of a token.
///
/// # Safety
///
/// The list has an element for this token, and nobody writes it.
pub(crate) unsafe fn read_slot(slots: &Operand, token: usize) -> i64 {
    // SAFETY: passed on.
    unsafe { read_index(slots.dtype, at(slots, &[token])) }
}

/// Memory for the places of a run, kept from one run to the next.
#[derive(Debug, Default)]
pub(super) struct Places {
    places: Vec<Place>,
    /// Slot and token of every token that is written.
    order: Vec<(i64, u32)>,
}

impl Places {
    /// The place of every token, and what tokens without one are to be reported for. Of several
    /// tokens with one slot the last is written, as by a loop over the tokens.
    pub(super) fn find(&mut self, problem: &Problem, pool: &Pool) -> (&[Place], Status) {
        let mut status = Status::CLEAR;
        self.order.clear();
        for token in 0..problem.tokens {
            // SAFETY: the plan holds the list borrowed, and it has T elements.
            let slot = unsafe { read_slot(&pool.slots, token) };
            if slot < 0 || slot == pool.reserved_slot {
                continue;
            }
            if !pool.holds(slot) {
                note(
                    &mut status.bad_slots,
                    &mut status.slot_high,
                    &mut status.slot_low,
                    token,
                    slot,
                );
                continue;
            }
            // SAFETY: likewise for positions.
            let position =
                unsafe { read_index(problem.positions.dtype, at(&problem.positions, &[token])) };
            if usize::try_from(position).is_ok_and(|row| row < problem.table_rows) {
                self.order.push((slot, token as u32));
            } else {
                note(
                    &mut status.bad_positions,
                    &mut status.position_high,
                    &mut status.position_low,
                    token,
                    position,
                );
            }
        }
        if !self.order.is_sorted() {
            self.order.sort_unstable();
        }
        self.places.clear();
        self.places.resize(problem.tokens, Place::default());
        let page_size = pool.page_size as i64;
        for (index, &(slot, token)) in self.order.iter().enumerate() {
            if self.order.get(index + 1).is_some_and(|next| next.0 == slot) {
                continue;
            }
            let (page, token_in_page) = (slot / page_size, slot % page_size);
            self.places[token as usize] = Place {
                write: true,
                k: pool.k.offset(page, token_in_page),
                v: pool.v.offset(page, token_in_page),
            };
        }
        (&self.places, status)
    }
}
