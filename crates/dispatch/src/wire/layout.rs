//! Slot layout: the header, then each tensor at a fixed position.

use super::schema::Tensor;

/// Header size in bytes before the tensor lengths.
pub(super) const FIXED_BYTES: u64 = 32;

/// Alignment for headers, tensors and slots.
pub const ALIGNMENT: u64 = 64;

/// Positions in slots in one direction; equal at both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    tensors: Box<[Tensor]>,
    offsets: Box<[u64]>,
    /// Maximum bytes per tensor, and bytes per index along the variable dimension, 0 with a fixed shape.
    limits: Box<[(u64, u64)]>,
    header: u64,
    stride: u64,
    /// Token tensor.
    stream: Option<usize>,
}

impl Layout {
    /// Layout for these tensors, which have passed [`super::Schema::check`].
    pub fn new(tensors: &[Tensor]) -> Layout {
        let header = (FIXED_BYTES + 8 * tensors.len() as u64).next_multiple_of(ALIGNMENT);
        let mut end = header;
        let place = |tensor: &Tensor| {
            let offset = end;
            end = (end + tensor.max_bytes()).next_multiple_of(ALIGNMENT);
            offset
        };
        let offsets = tensors.iter().map(place).collect();
        let limits = tensors.iter().map(|tensor| (tensor.max_bytes(), tensor.unit().unwrap_or(0)));
        let limits = limits.collect();
        let stream = tensors.iter().position(Tensor::has_tokens);
        Layout { limits, tensors: tensors.into(), offsets, header, stride: end, stream }
    }

    /// Maximum bytes per tensor.
    pub fn most(&self) -> impl Iterator<Item = u64> + '_ {
        self.limits.iter().map(|(most, _)| *most)
    }

    /// Tensors in the layout.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// True if a tensor may have this many bytes: 40 but not 42 for int64 elements, for example.
    #[inline]
    pub fn admits(&self, tensor: usize, bytes: u64) -> bool {
        let (most, unit) = self.limits[tensor];
        bytes == most || bytes < most && unit > 0 && bytes.is_multiple_of(unit)
    }

    /// Tensor that may arrive in parts.
    #[inline]
    pub fn stream(&self) -> Option<usize> {
        self.stream
    }

    /// Bytes per token; 0 without a token tensor.
    pub fn token_bytes(&self) -> u64 {
        self.stream.map_or(0, |tensor| self.limits[tensor].1)
    }

    /// Header size in bytes.
    pub fn header_bytes(&self) -> u64 {
        self.header
    }

    /// Tensor position in a slot.
    pub fn offset(&self, tensor: usize) -> u64 {
        self.offsets[tensor]
    }

    /// Slot size in bytes.
    pub fn stride(&self) -> u64 {
        self.stride
    }
}
