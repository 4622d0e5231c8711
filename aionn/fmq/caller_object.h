/* The Python object `Caller`: the app's end of a burst, with its requests in flight.
 *
 * Invariants
 *     At most 2 * `depth` requests are in flight, and at most `depth` of them may be run, because `depth` withdrawn ones have left their
 *     places to others. A further one keeps its place until it is answered.
 *     `first` is a list in the order of identities. The first `in_flight` requests of it are sent, and `unsent` is the next one.
 *     A request is in the list until it is answered, or the burst ends, or its caller leaves before it is sent. Until then it holds its
 *     frame, unless it was withdrawn before the driver claimed it. So no frame is used again while the driver may still write to it.
 *     A request enters the list before the loop can run after its packet is written. So no caller waits on a burst that has ended.
 *     While any request is in flight the result queue is armed (`armed`), or its event is pending, or `_look_again` is
 *     scheduled (`looking`), or this end looks right now.
 *     `armed` is true from a successful arming until the event has been seen, because the peer clears the shared word.
 *     An answer is taken only if its body is known and its request is in flight. The general path judges any other.
 *     While a request is in flight, `late` will be called `patience_ns` after the oldest one was sent, or earlier. All that is needed for
 *     that lies in this object, because the peer may damage the shared words.
 *     A request whose `future` is NULL has `deadline_ns` 0. `late` skips it, because no caller waits for it here.
 *     Any call of Python may end the burst. So `over` is asked, and the list is read anew, after each such call. */
#ifndef AIONN_FMQ_CALLER_OBJECT_H
#define AIONN_FMQ_CALLER_OBJECT_H

#include <Python.h>

#include "../hal/burst_slot.h"
#include "../hal/trace_ring.h"
#include "exchange_object.h"

struct request {
    struct request *next;
    uint64_t identity;
    uint64_t stamp_at; /* where its stamp lies in the queue, if it is sent */
    int64_t began_ns, deadline_ns;               /* when it was sent; 0 if its caller has no deadline, or has gone */
    long long sleeps;                            /* how often the burst had slept until then */
    PyObject *body;                              /* until it is sent */
    PyObject *future, *settled, *idle;           /* each may be NULL, `future` when the caller has left or waits elsewhere */
    uint64_t captured_ns;                        /* of a traced request, or 0 */
    bool sent, withdrawn;                        /* withdrawn: the driver is sure never to run it */
};

/* What Python does for this object. See `Caller.begin` in _ring.pyi. */
enum call { CREATE_FUTURE, CALL_SOON, GENERAL, UNSENDABLE, WAKE_BY, CAPTURED, CALLS };

enum name { SET_RESULT, DONE, DTYPE, SHAPE, NAMES };

typedef struct {
    ExchangeObject exchange; /* first, so that a Caller is one */
    struct spin_policy spin;
    struct request *first, *last, *unsent;
    struct request *spare; /* with a future, so that nothing can fail once a packet is written */
    unsigned long long last_identity;
    unsigned depth, in_flight, withdrawn; /* `withdrawn` of those in flight are sure never to be run */
    unsigned woken; /* callers that the last look has woken and that have not called since */
    bool armed, looking, joined, over;
    bool crowded; /* when it sent last, more than SPIN_FEW bursts took turns */
    bool alone;   /* its thread runs no loop, so a call looks for as long as the policy says, and then sleeps */
    int sleep_fd; /* what such a call sleeps on: readable when anything that the thread waits for is; or -1 */
    long long looking_until_ns, timer_ns;        /* `timer_ns`: when `late` will be called, or 0 */
    long long patience_ns, asked_ns;             /* an older request is overdue, or 0; when `late` last found one overdue */
    unsigned long long asked;                    /* the request that `late` found overdue last */
    long long yield_by_ns, yield_ns, inline_ns;  /* see spin_policy.py */
    long long sleeps, answers_at_once, answers; /* counts */
    long long last_began_ns, last_sleeps;        /* of the request answered last */
    PyObject *calls[CALLS], *look_again;
    PyObject *raised[3];     /* what a callback has raised, until `flight_raise`: type, error and traceback; or NULL */
    PyObject *names[NAMES]; /* strings; set as soon as `begin` has been called */
    Py_buffer counts;        /* exports `slot` */
    struct page_slot *slot;  /* of the app's statistics page, or NULL */
    unsigned long long burst; /* names the burst in trace records */
} CallerObject;

/* ---- _flight.c ---- */
struct request *flight_prepare(CallerObject *self);
void flight_free(struct request *r);
void flight_add(CallerObject *self, struct request *r);
void flight_remove(CallerObject *self, struct request *r);
struct request *flight_find(CallerObject *self, uint64_t identity);
void flight_finish(CallerObject *self, struct request *r, PyObject *answer, PyObject *value);
PyObject *flight_answer(CallerObject *self, const struct request *r, PyObject *value, uint64_t service_ns, int64_t now_ns);
void flight_settle(CallerObject *self, struct request *r, PyObject *value, uint64_t service_ns, int64_t now_ns);
PyObject *flight_raise(CallerObject *self, PyObject *result);
void flight_call(CallerObject *self, PyObject *callable, PyObject *argument);
void flight_take(CallerObject *self);
void flight_call_back(CallerObject *self, enum call which, PyObject *argument);
void flight_look(CallerObject *self, int64_t now_ns, bool expected);
void flight_watch(CallerObject *self);
void flight_send_unsent(CallerObject *self);
PyObject *flight_event(PyObject *object, PyObject *none);
PyObject *flight_look_again(PyObject *object, PyObject *none);

/* Return whether another request may be sent. Up to `depth` withdrawn requests take no place of `depth`. */
static inline bool flight_has_place(const CallerObject *self)
{
    return self->in_flight - (self->withdrawn < self->depth ? self->withdrawn : self->depth) < self->depth;
}

/* Count a request that lies in the queue now, with a body of that length. */
static inline void flight_note_sent(const CallerObject *self, struct request *r, Py_ssize_t length, int64_t now_ns)
{
    r->stamp_at = self->exchange.requests->ring.write_at + (uint64_t)length;
    slot_sent(self->slot);
    if (slot_is_traced(self->slot, now_ns)) {
        const page_word *words = page_words(self->slot);
        slot_trace(self->slot, TRACE_SENT, self->burst, r->identity, now_ns, words ? page_load(&words[SLOT_NUMBER]) : 0, r->captured_ns);
    }
}

/* ---- _request.c ---- */
void request_takes_no_turn(const CallerObject *self);
PyObject *request_send(PyObject *object, PyObject *const *args, Py_ssize_t given);
PyObject *request_start(PyObject *object, PyObject *const *args, Py_ssize_t given);
PyObject *request_post(PyObject *object, PyObject *const *args, Py_ssize_t given);

#endif
