//! The kernels on the host: a [`Device`] for tests, which looks at every access. Far too slow for
//! work, but it is the kernel code itself that runs, shuffles included.
//!
//! One thread runs the lanes of a warp one after the other, again and again: in each pass a
//! shuffle gives what the lanes handed it in the pass before. What they hand to the first shuffle
//! is right in the first pass, what they hand to the next one a pass later, and so on. A pass that
//! hands over what it was given is therefore right throughout, and only its stores are done.
//!
//! This asks one thing of kernels: what they shuffle are values, which decide neither where memory
//! is accessed nor which shuffle comes next. So the accesses of the first pass are those of all
//! passes, and are checked once; a kernel that strays from them later has a fault as well.

use core::cell::RefCell;
use core::fmt;
use std::collections::BTreeMap;
use std::format;
use std::string::String;
use std::vec::Vec;

use crate::abi::Params;
use crate::convert;
use crate::gpu::{Device, Policy};
use crate::kernels;

/// Sets of addresses, as ranges that do not touch each other: first address, address behind.
#[derive(Clone, Debug, Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn add(&mut self, start: u64, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let (mut start, mut end) = (start, start.saturating_add(bytes as u64));
        while let Some((&from, &to)) = self.0.range(..=end).next_back()
            && to >= start
        {
            self.0.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.0.insert(start, end);
    }

    /// The first of these bytes that is not in the set.
    fn first_outside(&self, start: u64, bytes: usize) -> Option<u64> {
        let end = match self.0.range(..=start).next_back() {
            Some((_, &end)) if end > start => end,
            _ => start,
        };
        (end < start.saturating_add(bytes as u64)).then_some(end)
    }

    /// Whether any of these bytes is in the set.
    fn contain_any(&self, start: u64, bytes: usize) -> bool {
        let last = self.0.range(..start.saturating_add(bytes as u64));
        last.last().is_some_and(|(_, &end)| end > start)
    }
}

/// The memory that a job may touch, byte by byte.
#[derive(Clone, Debug, Default)]
pub struct Permissions {
    read: Ranges,
    write: Ranges,
    count: Ranges,
}

impl Permissions {
    /// These bytes may be loaded and prefetched.
    pub fn allow_reads(&mut self, address: u64, bytes: usize) {
        self.read.add(address, bytes);
    }

    /// These bytes may be stored, once.
    pub fn allow_writes(&mut self, address: u64, bytes: usize) {
        self.write.add(address, bytes);
    }

    /// These bytes are of a status record: counters and minima, neither loaded nor stored.
    pub fn allow_reports(&mut self, address: u64, bytes: usize) {
        self.count.add(address, bytes);
    }
}

/// What a kernel did that no kernel may do, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(String);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for Fault {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Load,
    Store,
    Prefetch,
    Report,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Access {
    kind: Kind,
    address: u64,
    bytes: usize,
}

impl Access {
    /// What is wrong with it, if anything is.
    fn fault(&self, begun: bool, permissions: Option<&Permissions>) -> Option<String> {
        let Self {
            kind,
            address,
            bytes,
        } = *self;
        if !begun && kind != Kind::Prefetch {
            return Some("comes before `begin`".into());
        }
        // Aligned to its own size, not only to that of its elements.
        if !address.is_multiple_of(bytes as u64) {
            return Some("is misaligned".into());
        }
        let permissions = permissions?;
        let allowed = match kind {
            Kind::Load | Kind::Prefetch => &permissions.read,
            Kind::Store => &permissions.write,
            Kind::Report => &permissions.count,
        };
        let outside = allowed.first_outside(address, bytes)?;
        Some(format!("is not allowed to touch byte {outside:#x}"))
    }
}

/// Where all lanes of a warp meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meeting {
    ShuffleXor,
    ShuffleFrom,
    KeepOrder,
}

/// What reaches memory at the end of the last pass. Bytes are as they lie in memory.
#[derive(Clone, Copy)]
enum Effect {
    Store {
        address: u64,
        bytes: [u8; 16],
        len: usize,
        thread: u32,
    },
    Count {
        address: u64,
    },
    Lower {
        address: u64,
        value: u64,
    },
}

/// The state of a warp.
#[derive(Default)]
struct Warp {
    /// Meetings of the pass before, with what each lane handed over.
    known: Vec<(Meeting, [u32; 32])>,
    /// Those of this pass so far.
    meetings: Vec<(Meeting, [u32; 32])>,
    /// Of the first pass, lane by lane.
    accesses: [Vec<Access>; 32],
    is_first_pass: bool,
    effects: Vec<Effect>,
    /// How far the current lane is: meetings, accesses, and whether it called `begin`.
    met: usize,
    accessed: usize,
    begun: bool,
    /// The first fault. Nothing is accessed any more behind it.
    fault: Option<Fault>,
}

impl Warp {
    /// Makes room for another warp.
    fn clear(&mut self) {
        self.known.clear();
        self.meetings.clear();
        self.effects.clear();
        self.accesses.iter_mut().for_each(Vec::clear);
        self.is_first_pass = true;
    }

    fn next_pass(&mut self) {
        core::mem::swap(&mut self.known, &mut self.meetings);
        self.meetings.clear();
        self.effects.clear();
        self.is_first_pass = false;
    }
}

/// The place of a thread.
#[derive(Clone, Copy)]
struct Place<'a> {
    entry: &'a str,
    thread: u32,
    block_threads: u32,
    /// Along x and y.
    block: (u32, u32),
    grid: (u32, u32),
}

impl Place<'_> {
    fn fault(&self, what: fmt::Arguments<'_>) -> Fault {
        let Self {
            entry,
            thread,
            block,
            ..
        } = self;
        Fault(format!("{entry}, block {block:?}, thread {thread}: {what}"))
    }
}

/// A thread of a kernel.
#[derive(Clone, Copy)]
struct Lane<'a> {
    warp: &'a RefCell<Warp>,
    permissions: Option<&'a Permissions>,
    place: Place<'a>,
}

impl Lane<'_> {
    fn index(self) -> usize {
        (self.place.thread & 31) as usize
    }

    /// Hands over `value` and gets that of lane `from`.
    fn meet(self, meeting: Meeting, value: u32, from: u32) -> u32 {
        let warp = &mut *self.warp.borrow_mut();
        if warp.fault.is_some() {
            return 0;
        }
        let index = warp.met;
        warp.met += 1;
        if self.index() == 0 {
            warp.meetings.push((meeting, [0; 32]));
        }
        match warp.meetings.get_mut(index) {
            Some((other, values)) if *other == meeting => values[self.index()] = value,
            other => {
                let other = other.map(|(other, _)| other);
                warp.fault = Some(self.place.fault(format_args!(
                    "reaches {meeting:?} where lane 0 has {other:?}"
                )));
                return 0;
            }
        }
        let known = warp.known.get(index);
        known.map_or(0, |(_, values)| values[from as usize & 31])
    }

    /// Whether this access may be done.
    fn access(self, kind: Kind, address: u64, bytes: usize) -> bool {
        let warp = &mut *self.warp.borrow_mut();
        if warp.fault.is_some() {
            return false;
        }
        let access = Access {
            kind,
            address,
            bytes,
        };
        let index = warp.accessed;
        warp.accessed += 1;
        let accesses = &mut warp.accesses[self.index()];
        let fault = if warp.is_first_pass {
            accesses.push(access);
            access.fault(warp.begun, self.permissions)
        } else if accesses.get(index) != Some(&access) {
            Some("depends on what was shuffled".into())
        } else {
            None
        };
        if let Some(fault) = fault {
            warp.fault = Some(self.place.fault(format_args!(
                "the {kind:?} of {bytes} bytes at {address:#x} {fault}"
            )));
            return false;
        }
        true
    }

    /// Reads a `T` at `address`, or gives the default.
    ///
    /// # Safety
    ///
    /// Where `when` holds, `address` is readable and any bytes are a `T`.
    unsafe fn load<T: Default + Copy>(self, when: bool, address: u64) -> T {
        if when && self.access(Kind::Load, address, size_of::<T>()) {
            // SAFETY: the caller's promise.
            unsafe { (address as usize as *const T).read_unaligned() }
        } else {
            T::default()
        }
    }

    /// Notes that `bytes` (16 at most) go to `address`.
    fn store(self, when: bool, address: u64, bytes: &[u8]) {
        let len = bytes.len();
        if when && self.access(Kind::Store, address, len) {
            let mut padded = [0; 16];
            padded[..len].copy_from_slice(bytes);
            self.effect(Effect::Store {
                address,
                bytes: padded,
                len,
                thread: self.place.thread,
            });
        }
    }

    fn effect(self, effect: Effect) {
        self.warp.borrow_mut().effects.push(effect);
    }

    /// One pass of the kernel.
    fn run(self, kernel: impl Fn(Self)) -> Result<(), Fault> {
        {
            let mut warp = self.warp.borrow_mut();
            (warp.met, warp.accessed, warp.begun) = (0, 0, false);
        }
        kernel(self);
        let mut warp = self.warp.borrow_mut();
        if let Some(fault) = warp.fault.take() {
            return Err(fault);
        }
        if warp.met < warp.meetings.len() {
            let (next, _) = warp.meetings[warp.met];
            let fault = format_args!("ends before the {next:?} that lane 0 reaches");
            return Err(self.place.fault(fault));
        }
        if warp.accessed < warp.accesses[self.index()].len() {
            let fault = format_args!("what it accesses depends on what was shuffled");
            return Err(self.place.fault(fault));
        }
        Ok(())
    }
}

impl Device for Lane<'_> {
    const OVERLAPS: bool = true;

    fn thread(self) -> u32 {
        self.place.thread
    }
    fn block_threads(self) -> u32 {
        self.place.block_threads
    }
    fn block_x(self) -> u32 {
        self.place.block.0
    }
    fn block_y(self) -> u32 {
        self.place.block.1
    }
    fn blocks_x(self) -> u32 {
        self.place.grid.0
    }
    fn blocks_y(self) -> u32 {
        self.place.grid.1
    }
    fn begin(self) {
        self.warp.borrow_mut().begun = true;
    }
    fn keep_order(self) {
        self.meet(Meeting::KeepOrder, 0, 0);
    }
    fn shuffle_xor(self, value: f32, mask: u32) -> f32 {
        let from = self.place.thread ^ mask;
        f32::from_bits(self.meet(Meeting::ShuffleXor, value.to_bits(), from))
    }
    fn shuffle_from(self, value: f32, lane: u32) -> f32 {
        f32::from_bits(self.meet(Meeting::ShuffleFrom, value.to_bits(), lane))
    }
    unsafe fn load_16(self, when: bool, address: u64) -> u16 {
        // SAFETY: the caller's promise.
        unsafe { self.load(when, address) }
    }
    unsafe fn load_32(self, when: bool, address: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { self.load(when, address) }
    }
    unsafe fn load_64(self, when: bool, address: u64, _: Option<Policy>) -> [u32; 2] {
        // SAFETY: the caller's promise.
        unsafe { self.load(when, address) }
    }
    unsafe fn load_128(self, when: bool, address: u64, _: Option<Policy>) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { self.load(when, address) }
    }
    unsafe fn load_128_once(self, address: u64, _: Policy) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { self.load(true, address) }
    }
    unsafe fn prefetch(self, address: u64) {
        self.access(Kind::Prefetch, address, 1);
    }
    unsafe fn store_8(self, when: bool, address: u64, value: u8) {
        self.store(when, address, &[value]);
    }
    unsafe fn store_16(self, when: bool, address: u64, value: u16) {
        self.store(when, address, &value.to_ne_bytes());
    }
    unsafe fn store_32(self, when: bool, address: u64, value: u32, _: Policy) {
        self.store(when, address, &value.to_ne_bytes());
    }
    unsafe fn store_64(self, when: bool, address: u64, value: [u32; 2], _: Policy) {
        self.store(when, address, value.map(u32::to_ne_bytes).as_flattened());
    }
    unsafe fn store_128(self, when: bool, address: u64, value: [u32; 4], _: Policy) {
        self.store(when, address, value.map(u32::to_ne_bytes).as_flattened());
    }
    unsafe fn count(self, address: u64) {
        if self.access(Kind::Report, address, 8) {
            self.effect(Effect::Count { address });
        }
    }
    unsafe fn lower(self, address: u64, value: u64) {
        if self.access(Kind::Report, address, 8) {
            self.effect(Effect::Lower { address, value });
        }
    }
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    fn sqrt(self, value: f32) -> f32 {
        value.sqrt()
    }
    fn f16x2(self, low: f32, high: f32) -> u32 {
        u32::from(convert::f16_from_f32(low)) | u32::from(convert::f16_from_f32(high)) << 16
    }
    fn f16_to_f32(self, bits: u16) -> f32 {
        convert::f16_to_f32(bits)
    }
}

/// The emulated device during one job, which may take several launches.
#[derive(Debug, Default)]
pub struct Emulator {
    permissions: Option<Permissions>,
    /// What the job has written so far.
    written: Ranges,
}

impl Emulator {
    /// A device on which a job may touch what `permissions` names, or, without any, everything.
    /// Other faults are found either way.
    pub fn new(permissions: Option<Permissions>) -> Self {
        Self {
            permissions,
            written: Ranges::default(),
        }
    }

    /// Runs the kernel `entry` over a grid, one warp after the other.
    ///
    /// # Errors
    ///
    /// The first fault of the kernel: an access that is not permitted, misaligned or in front of
    /// [`Device::begin`], a byte that the job wrote before, a lane that does not reach the same
    /// shuffles as the others; or that there is no such kernel. Warps before the one at fault have
    /// written what they write.
    ///
    /// # Safety
    ///
    /// `params` describes live host memory as the kernel's contract demands (what the permissions
    /// forbid is not touched), `grid` (blocks along x and y) and `threads` are those of
    /// [`crate::launch`].
    pub unsafe fn launch(
        &mut self,
        entry: &str,
        grid: (u32, u32),
        threads: u32,
        params: &Params,
    ) -> Result<(), Fault> {
        macro_rules! kernel {
            ($($name:ident => $body:expr;)*) => {
                match entry {
                    $(stringify!($name) => {
                        // SAFETY: the caller's promise.
                        let kernel = |lane: Lane<'_>| unsafe { $body(lane, params) };
                        // SAFETY: the caller's promise: the kernel keeps to live memory.
                        unsafe { self.over_grid(entry, grid, threads, kernel) }
                    })*
                    _ => Err(Fault(format!("there is no kernel {entry}"))),
                }
            };
        }
        kernels::for_each_entry!(kernel)
    }

    /// Runs every warp of a grid.
    ///
    /// # Safety
    ///
    /// The kernel keeps its promises to [`Device`]: where it has permission, it accesses live
    /// memory.
    unsafe fn over_grid(
        &mut self,
        entry: &str,
        grid: (u32, u32),
        threads: u32,
        kernel: impl Fn(Lane<'_>),
    ) -> Result<(), Fault> {
        let warp = RefCell::new(Warp::default());
        for block_y in 0..grid.1 {
            for block_x in 0..grid.0 {
                for first in (0..threads).step_by(32) {
                    let place = Place {
                        entry,
                        thread: first,
                        block_threads: threads,
                        block: (block_x, block_y),
                        grid,
                    };
                    self.settle(&warp, place, &kernel)?;
                    // SAFETY: the caller's promise.
                    unsafe { self.write(&warp.borrow().effects, place) }?;
                }
            }
        }
        Ok(())
    }

    /// Runs a warp, whose first thread is at `first`, until it hands over what it was given.
    fn settle(
        &self,
        warp: &RefCell<Warp>,
        first: Place<'_>,
        kernel: impl Fn(Lane<'_>),
    ) -> Result<(), Fault> {
        warp.borrow_mut().clear();
        loop {
            for index in 0..32 {
                let lane = Lane {
                    warp,
                    permissions: self.permissions.as_ref(),
                    place: Place {
                        thread: first.thread + index,
                        ..first
                    },
                };
                lane.run(&kernel)?;
            }
            let mut warp = warp.borrow_mut();
            if warp.known == warp.meetings {
                return Ok(());
            }
            warp.next_pass();
        }
    }

    /// Lets memory see what a warp did.
    ///
    /// # Safety
    ///
    /// The addresses are those of live memory of the right kind.
    unsafe fn write(&mut self, effects: &[Effect], place: Place<'_>) -> Result<(), Fault> {
        for effect in effects {
            match *effect {
                Effect::Store {
                    address,
                    bytes,
                    len,
                    thread,
                } => {
                    if self.written.contain_any(address, len) {
                        return Err(Place { thread, ..place }.fault(format_args!(
                            "the Store of {len} bytes at {address:#x} writes what was written before"
                        )));
                    }
                    self.written.add(address, len);
                    let to = address as usize as *mut u8;
                    // SAFETY: the caller's promise.
                    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), len) };
                }
                Effect::Count { address } => {
                    let field = address as usize as *mut u64;
                    // SAFETY: the caller's promise; the address is aligned (`Access::fault`).
                    unsafe { *field = (*field).wrapping_add(1) };
                }
                Effect::Lower { address, value } => {
                    let field = address as usize as *mut u64;
                    // SAFETY: as above.
                    unsafe { *field = value.min(*field) };
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    /// Runs one block of `threads` threads of a kernel, which gets the addresses of 32 words that may
    /// be read, 0, 1, 2, ..., and of 32 that may be written, which are returned.
    fn run(threads: u32, kernel: impl Fn(Lane<'_>, u64, u64)) -> Result<[u32; 32], String> {
        let words: [u32; 32] = core::array::from_fn(|i| i as u32);
        let mut input = [0u128; 10];
        let mut output = [0u128; 10];
        let (from, to) = (
            input.as_mut_ptr() as u64 + 16,
            output.as_mut_ptr() as u64 + 16,
        );
        // SAFETY: the words lie within the input.
        unsafe { (from as usize as *mut [u32; 32]).write(words) };
        let mut permissions = Permissions::default();
        permissions.allow_reads(from, 128);
        permissions.allow_writes(to, 128);
        let mut emulator = Emulator::new(Some(permissions));
        // SAFETY: what there is permission for is live.
        let done =
            unsafe { emulator.over_grid("test", (1, 1), threads, |lane| kernel(lane, from, to)) };
        done.map_err(|fault| fault.to_string())?;
        // SAFETY: the words lie within the output.
        Ok(unsafe { (to as usize as *const [u32; 32]).read() })
    }

    fn word(base: u64, index: u32) -> u64 {
        base.wrapping_add(4 * u64::from(index))
    }

    fn load(d: Lane<'_>, when: bool, address: u64) -> u32 {
        // SAFETY: what there is permission for is live, as in the functions below.
        unsafe { d.load_32(when, address) }
    }

    fn store(d: Lane<'_>, when: bool, address: u64, value: u32) {
        // SAFETY: as above.
        unsafe { d.store_32(when, address, value, Policy(0)) }
    }

    fn store_16(d: Lane<'_>, when: bool, address: u64, value: u16) {
        // SAFETY: as above.
        unsafe { d.store_16(when, address, value) }
    }

    fn assert_fault(found: Result<[u32; 32], String>, expected: &str) {
        let found = found.expect_err(expected);
        assert!(found.contains(expected), "{found}");
    }

    #[test]
    fn ranges() {
        let mut ranges = Ranges::default();
        for (start, bytes) in [(10, 2), (20, 5), (12, 3), (30, 0), (14, 2)] {
            ranges.add(start, bytes);
        }
        assert_eq!(ranges.0, BTreeMap::from([(10, 16), (20, 25)]));
        assert_eq!(ranges.first_outside(10, 6), None);
        assert_eq!(ranges.first_outside(11, 6), Some(16));
        assert_eq!(ranges.first_outside(9, 2), Some(9));
        assert_eq!(ranges.first_outside(25, 1), Some(25));
        assert!(ranges.contain_any(15, 4) && ranges.contain_any(16, 5));
        assert!(!ranges.contain_any(16, 4) && !ranges.contain_any(25, 9));
        assert!(!ranges.contain_any(0, 10) && ranges.contain_any(0, 11));
        ranges.add(0, 100);
        assert_eq!(ranges.0, BTreeMap::from([(0, 100)]));
        assert_eq!(ranges.first_outside(u64::MAX - 3, 16), Some(u64::MAX - 3));
    }

    #[test]
    fn shuffles_of_shuffles() {
        let words = run(32, |d, from, to| {
            d.begin();
            let mut sum = load(d, true, word(from, d.thread())) as f32;
            for step in 0..5 {
                sum += d.shuffle_xor(sum, 1 << step);
            }
            let next = d.shuffle_from(sum + d.thread() as f32, (d.thread() + 1) & 31);
            store(d, true, word(to, d.thread()), next as u32);
        });
        assert_eq!(
            words,
            Ok(core::array::from_fn(|i| 496 + (i as u32 + 1) % 32))
        );
    }

    /// Atomics reach memory once, however many passes there are.
    #[test]
    fn reports() {
        let mut record = [0u64, u64::MAX];
        let address = record.as_mut_ptr() as u64;
        let run = |permissions: Permissions| {
            let mut emulator = Emulator::new(Some(permissions));
            let kernel = |d: Lane<'_>| {
                d.begin();
                d.shuffle_xor(1.0, 1);
                // SAFETY: the record is live.
                unsafe {
                    d.count(address);
                    d.lower(address + 8, u64::from(100 - d.thread()));
                }
            };
            // SAFETY: the record is live.
            unsafe { emulator.over_grid("test", (1, 1), 64, kernel) }
        };
        let mut permissions = Permissions::default();
        permissions.allow_reports(address, 16);
        assert_eq!(run(permissions.clone()), Ok(()));
        // SAFETY: the address is that of the record.
        let found = unsafe { (address as usize as *const [u64; 2]).read() };
        assert_eq!(found, [64, 37]);
        let mut permissions = Permissions::default();
        permissions.allow_writes(address, 16);
        assert!(run(permissions).is_err());
    }

    #[test]
    fn accesses_without_permission() {
        let load_at = |index: u32| {
            run(32, move |d, from, _| {
                d.begin();
                load(d, d.thread() == 7, word(from, index));
            })
        };
        assert!(load_at(31).is_ok());
        assert_fault(load_at(32), "thread 7: the Load of 4 bytes at");
        assert_fault(load_at(u32::MAX), "is not allowed to touch byte");
        let store_at = |index: u32| {
            run(32, move |d, _, to| {
                d.begin();
                store(d, d.thread() == 31, word(to, index), 1);
            })
        };
        assert!(store_at(31).is_ok());
        assert_fault(store_at(32), "thread 31: the Store of 4 bytes at");
        assert_fault(store_at(u32::MAX), "is not allowed to touch byte");
        let prefetch_at = |index: u32| {
            run(32, move |d, from, _| {
                // SAFETY: what there is permission for is live.
                unsafe { d.prefetch(word(from, index)) }
            })
        };
        assert!(prefetch_at(31).is_ok());
        assert_fault(prefetch_at(32), "thread 0: the Prefetch");
        // What may be written may not be read, nor the other way round.
        let found = run(32, |d, _, to| {
            d.begin();
            load(d, true, to);
        });
        assert_fault(found, "is not allowed to touch byte");
        let found = run(32, |d, from, _| {
            d.begin();
            store(d, d.thread() == 0, from, 1);
        });
        assert_fault(found, "is not allowed to touch byte");
    }

    #[test]
    fn bytes_written_twice() {
        let expected = "writes what was written before";
        let run = |kernel: fn(Lane<'_>, u64)| {
            run(64, move |d, _, to| {
                d.begin();
                kernel(d, to);
            })
        };
        let by_two_lanes = run(|d, to| {
            store(d, d.thread() < 32, word(to, d.thread() / 2), 1);
        });
        assert_fault(by_two_lanes, expected);
        let by_one_lane = run(|d, to| {
            store_16(d, d.thread() == 3, to, 1);
            store_16(d, d.thread() == 3, to, 1);
        });
        assert_fault(by_one_lane, expected);
        let by_two_warps = run(|d, to| store(d, true, word(to, d.thread() & 31), 1));
        assert_fault(by_two_warps, "thread 32: the Store");
        let in_part = run(|d, to| {
            store(d, d.thread() == 1, to, 1);
            store_16(d, d.thread() == 40, to + 2, 1);
        });
        assert_fault(in_part, "thread 40: the Store of 2 bytes");
        let neighbours = run(|d, to| store_16(d, true, to + u64::from(2 * d.thread()), 1));
        assert_eq!(neighbours, Ok([0x1_0001; 32]));
    }

    /// Nor by two launches of a job.
    #[test]
    fn bytes_written_by_two_launches() {
        let mut output = 0u32;
        let to = &raw mut output as u64;
        let mut emulator = Emulator::default();
        let kernel = |d: Lane<'_>| {
            d.begin();
            store(d, d.thread() == 0, to, 1);
        };
        // SAFETY: the output is live.
        let launches =
            [(); 2].map(|()| unsafe { emulator.over_grid("test", (1, 1), 32, kernel).is_ok() });
        assert_eq!(launches, [true, false]);
    }

    #[test]
    fn accesses_before_begin() {
        let found = run(32, |d, from, _| {
            load(d, d.thread() == 9, from);
            d.begin();
        });
        assert_fault(found, "thread 9: the Load of 4 bytes");
        let found = run(32, |d, _, to| {
            if d.thread() < 30 {
                d.begin();
            }
            store(d, true, word(to, d.thread()), 0);
        });
        assert_fault(found, "thread 30: the Store of 4 bytes");
    }

    #[test]
    fn misaligned_accesses() {
        let found = run(32, |d, from, _| {
            d.begin();
            // SAFETY: what there is permission for is live.
            unsafe { d.load_64(true, from + 4, None) };
        });
        assert_fault(found, "is misaligned");
        let found = run(32, |d, _, to| {
            d.begin();
            store_16(d, d.thread() == 0, to + 1, 0);
        });
        assert_fault(found, "is misaligned");
    }

    #[test]
    fn shuffles_that_a_lane_misses() {
        let run = |kernel: fn(Lane<'_>)| run(32, move |d, _, _| kernel(d));
        let fewer = run(|d| {
            if d.thread() != 5 {
                d.shuffle_xor(0.0, 1);
            }
        });
        assert_fault(fewer, "thread 5: ends before the ShuffleXor");
        let more = run(|d| {
            if d.thread() == 5 {
                d.shuffle_from(0.0, 1);
            }
        });
        assert_fault(more, "thread 5: reaches ShuffleFrom where lane 0 has None");
        let others = run(|d| {
            if d.thread() == 5 {
                d.keep_order();
            }
            d.shuffle_xor(0.0, 1);
            if d.thread() != 5 {
                d.keep_order();
            }
        });
        assert_fault(
            others,
            "reaches KeepOrder where lane 0 has Some(ShuffleXor)",
        );
    }

    #[test]
    fn accesses_that_depend_on_shuffles() {
        let expected = "depends on what was shuffled";
        let address = run(32, |d, from, _| {
            d.begin();
            let index = d.shuffle_xor(d.thread() as f32, 1) as u32;
            load(d, true, word(from, index));
        });
        assert_fault(address, expected);
        for first in [0.0, 1.0] {
            let condition = run(32, |d, from, _| {
                d.begin();
                let shuffled = d.shuffle_xor(1.0, 1);
                load(d, shuffled == first, from);
            });
            assert_fault(condition, expected);
        }
    }
}
