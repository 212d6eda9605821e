/* Weft's collectives as a table of C functions: the boundary between the PyTorch shim (C++, bound to one torch release)
 * and Weft's native module (Rust, any Python). `crates/python/src/collectives` implements it.
 *
 * Functions return WEFT_OK or an error code; `last_error` then has the text, for the calling thread. Any thread may
 * call at any time until `release`. All ranks call `start`, `run` and `exchange` in the same order. None needs the GIL
 * or takes it.
 */
#ifndef WEFT_H
#define WEFT_H

#include <stddef.h>
#include <stdint.h>

/* File version. Rises with every change; the shim rejects a table of another version. */
#define WEFT_ABI 2

enum weft_status {
  WEFT_OK = 0,
  /* The deadline passed. The operation goes on; the wait may be repeated. */
  WEFT_TIMEOUT = 1,
  /* The group has ended: a rank was lost or left, or the group was poisoned. The text names the rank. */
  WEFT_LOST = 2,
  /* An argument is invalid or not supported. No operation was started. */
  WEFT_INVALID = 3,
  /* The communicator was closed by this process. */
  WEFT_CLOSED = 4,
  /* Any other error. */
  WEFT_FAILED = 5,
};

enum weft_kind {
  /* Reduces `elements` in `input` into `output`, which may be `input`. */
  WEFT_ALL_REDUCE = 0,
  /* Reduces `elements` in `input`; this rank's share, elements / ranks, goes into `output`. */
  WEFT_REDUCE_SCATTER = 1,
  /* This rank's share, elements / ranks, is in `input`; all shares, `elements`, go into `output`. */
  WEFT_ALL_GATHER = 2,
  /* Copies `elements` from `output` at the root into `output` on all ranks; `input` equals `output`. */
  WEFT_BROADCAST = 3,
  /* Share i in `input` goes to rank i; share i in `output` comes from rank i. Shares are elements / ranks. */
  WEFT_ALL_TO_ALL = 4,
};

enum weft_element {
  WEFT_U8 = 0,
  WEFT_I8 = 1,
  WEFT_I16 = 2,
  WEFT_I32 = 3,
  WEFT_I64 = 4,
  WEFT_F16 = 5,
  WEFT_BF16 = 6,
  WEFT_F32 = 7,
  WEFT_F64 = 8,
  /* A byte, 0 or 1: sum and maximum are or, product and minimum are and. */
  WEFT_BOOL = 9,
};

enum weft_reduction {
  WEFT_SUM = 0,
  WEFT_PRODUCT = 1,
  WEFT_MIN = 2,
  WEFT_MAX = 3,
  WEFT_AND = 4,
  WEFT_OR = 5,
  WEFT_XOR = 6,
};

enum weft_scale {
  WEFT_NO_SCALE = 0,
  /* Sum divided by the rank count. */
  WEFT_AVERAGE = 1,
  /* Addends multiplied by `factor` before the sum. */
  WEFT_BEFORE = 2,
};

/* A collective whose shares are equal. */
typedef struct weft_call {
  uint32_t kind;
  uint32_t element;
  uint32_t reduction;
  uint32_t scale;
  double factor;
  uint32_t root;
  /* Element count in the whole vector. */
  uint64_t elements;
  const void *input;
  void *output;
} weft_call;

/* Memory for one peer. */
typedef struct weft_segment {
  void *data;
  uint64_t bytes;
} weft_segment;

/* Source value for a receive that accepts a message from any rank. */
#define WEFT_ANY_RANK UINT32_MAX

/* Memory that an operation was given stays valid until the operation is done; after an error, until `close`. */
typedef struct weft_table {
  uint32_t abi;
  uint32_t rank;
  uint32_t ranks;
  /* Starts a collective and returns at once. */
  int32_t (*start)(void *context, const weft_call *call, uint64_t *id);
  /* Starts a collective and waits for it as `wait` does. `id` becomes 0 if it is done; otherwise the operation goes on
   * under this number, and the result is WEFT_TIMEOUT, without a text. */
  int32_t (*run)(void *context, const weft_call *call, uint64_t timeout_ns, uint64_t *id);
  /* Starts an exchange of segments, one for each rank in both lists; segment r in `sends` has the length of this
   * rank's segment in `receives` at rank r. Empty segments do not travel. This rank's segment is copied. */
  int32_t (*exchange)(void *context, const weft_segment *sends, const weft_segment *receives, uint64_t *id);
  /* Starts a message. Messages with the same sender, receiver and tag keep their order. */
  int32_t (*send)(void *context, uint32_t peer, uint64_t tag, const void *data, uint64_t bytes, uint64_t *id);
  /* Starts receiving a message with `bytes` bytes from `peer` or WEFT_ANY_RANK. */
  int32_t (*receive)(void *context, uint32_t peer, uint64_t tag, void *data, uint64_t bytes, uint64_t *id);
  /* 1 if the operation is done, 0 if not or after an error. Makes progress for all operations. */
  int32_t (*is_done)(void *context, uint64_t id);
  /* Makes progress for all operations until this one is done; `from`: a received message's sender. An operation
   * that was waited for successfully is removed: later waits succeed at once, without `from`. */
  int32_t (*wait)(void *context, uint64_t id, uint64_t timeout_ns, uint32_t *from);
  /* The calling thread's last error text, cut to `capacity` bytes with the final zero; returns its length. */
  size_t (*last_error)(char *text, size_t capacity);
  /* Ends the group at every rank, with this text. */
  void (*poison)(void *context, const char *text);
  /* Ends all waits, now and later, with WEFT_CLOSED. */
  void (*end_waits)(void *context);
  /* Leaves the group and frees its resources, after `end_waits`. Other threads may still be inside a wait. */
  void (*close)(void *context);
  /* Frees the context; the last call. */
  void (*release)(void *context);
} weft_table;

#endif
