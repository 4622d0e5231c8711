/* `Listener`, `Lanes` and `Lane` (_listener.c, _lanes.c, _lane.c): the driver's end of bursts. A lane is a thread that waits
 * natively for the known requests of all bursts that are lent to its `Lanes`. It takes one, runs it in Python, and answers it by
 * its next call.
 *
 *     listener task                          lane
 *     lend -> lent                           event -> take -> run -> answer
 *     recall, or the lane gives back         a packet that is not known, is late, or the end: give back
 *     `returned` is called                   runs that have begun go on
 *     `idle` is called, if asked for         no lane runs a request of this burst any more
 *
 * Invariants
 *     Everything here is changed with the GIL held. A lane without the GIL waits on `epoll`, or looks at a ring that it holds.
 *     A burst's requests are taken in order and answered in order. An answer that comes early is held until those before it are there.
 *     While a burst is lent, one of these holds: its queue is armed, or it stands in `ready`, or a lane is about to look at it. A lane
 *     that has run a request of a burst looks at it again before it sleeps. So it disarms the queue when it ends its run.
 *     After a job, a lane looks at the bursts before it takes the next job. So neither keeps the other waiting.
 *     `returned` is called once for each `lend`, when the burst is not lent any more.
 *     A burst with an answer that has no room (`blocked`) is not lent. Its task writes that answer when no lane runs a request of it.
 *     A burst whose next request must wait for one of another burst (`waits`) is neither armed nor in `ready`. When a request is over that
 *     others wait for (`awaited`), the waiting bursts of that client are put into `ready`. So it is at the end of the other burst.
 *     A lane that sleeps is counted in `sleeping` before it releases the GIL, so a signal written after that wakes it.
 *     A lane joins requests only while no other lane is free. It takes one of each burst in turn, as many rounds as there are requests.
 *
 * tests/fmq/lane_model.py searches this protocol in all interleavings. */
#ifndef AIONN_FMQ_LANES_OBJECT_H
#define AIONN_FMQ_LANES_OBJECT_H

#include <Python.h>
#include <sys/epoll.h>

#include "../hal/model_slot.h"
#include "../hal/trace_ring.h"
#include "exchange_object.h"
#include "rhythm.h"

#define AHEAD 64u                   /* requests of one burst that may be taken and not answered */
#define SOON 0x4u                   /* a bit of the event flag: a request is about to come */
#define COMPANY_NS INT64_C(1000000) /* another model that was served this lately counts as company */
#define EVENTS 8                    /* that one look at epoll takes */
#define JOINED 63u                  /* requests that a lane takes to the first one of a joined run, at most */
#define SIGNAL UINT64_MAX           /* epoll data of `signal_fd`; else the place of a burst in `seats` and its generation */

typedef struct LanesObject LanesObject;

struct held { /* a request that has been taken, and its answer */
    PyObject *body; /* NULL until the answer is there */
    struct exchange_stamp stamp;
};

struct outcome { /* of a request that is over */
    uint32_t identity; /* its lower half */
    bool succeeded;
};

typedef struct {
    ExchangeObject exchange;
    LanesObject *lanes; /* held while `returned` is */
    PyObject *returned, *idle; /* called once: when it is not lent any more, and when no lane runs a request of it */
    uint32_t seat;
    unsigned running;         /* requests that lanes run now */
    uint64_t taken, answered; /* numbers of the next request to be taken, and of the next to be answered */
    struct held held[AHEAD];  /* by number; those from `answered` to `taken` are in hand */
    struct spin_policy spin;
    uint64_t burst; /* the number of this burst in traces */
    struct rhythm rhythm;
    unsigned warm_ups; /* warm runs so far */
    bool lent, exclusive, queued;
    bool blocked; /* an answer had no room, and waits in `held` */
    PyObject *siblings, *number; /* the listeners of the same client by their numbers, and the own number; or NULL */
    struct outcome outcomes[AHEAD]; /* of the requests that were over last, by identity */
    bool awaited, waits;
} ListenerObject;

struct seat {
    ListenerObject *listener; /* held while lent */
    uint32_t generation;
};

struct LanesObject {
    PyObject_HEAD
    int epoll_fd, signal_fd;
    struct seat *seats;
    uint64_t *ready; /* a ring of places with generations, in order of arrival; as large as `seats` */
    uint32_t room, lent, ready_first, ready_count;
    unsigned lanes, sleeping, jobs;
    bool looking, stopped, timed; /* `timed`: one of the lanes that sleep wakes by itself for a warm run */
};

struct run { /* a request that a lane runs now */
    ListenerObject *serves; /* its burst; held */
    uint64_t number;
    struct exchange_stamp stamp;
};

typedef struct {
    PyObject_HEAD
    LanesObject *lanes;
    struct run run; /* the only one, or the first of a joined run; `serves` is NULL between runs */
    struct run joined[JOINED]; /* the others of a joined run */
    unsigned joined_count;
    uint32_t kind; /* of these requests */
    bool warms;    /* this run is a warm run, and `serves` gets no answer */
    int64_t began_ns;
    int64_t since_ns; /* since when the lane has had nothing to do. 0: it has just run. -1: not known, and it does not look again */
    bool slept, after_job;
    Py_buffer page; /* the memory of `slot`, or empty */
    struct page_slot *slot; /* shows the runs of this lane, or NULL */
} LaneObject;

/* ---- _listener.c ---- */
enum turn { COME, PENDING, FORFEITED }; /* the request before has succeeded; is not over; has not succeeded, or is not known any more */
enum turn listener_turn(ListenerObject *listener, uint64_t after);
void listener_note(ListenerObject *listener, uint64_t identity, bool succeeded);

/* ---- _lanes.c ---- */
void lanes_wake_one(LanesObject *lanes);
void lanes_close_when_over(LanesObject *lanes);
void lanes_enqueue(LanesObject *lanes, ListenerObject *listener);
ListenerObject *lanes_dequeue(LanesObject *lanes);
void lanes_collect(LanesObject *lanes, const struct epoll_event *events, int count);
void lanes_give_back(ListenerObject *listener);
void lanes_call_once(PyObject **callback);

/* ---- _anticipate.c ---- */
int anticipate_wait(int epoll_fd, struct epoll_event *events, int most, int64_t wake_ns);
#define ANTICIPATE_ALONE_NS INT64_C(200000000) /* other models must have rested for so long */
bool anticipate_sleep(LanesObject *lanes, struct epoll_event *events, int most, int *count);
PyObject *anticipate_begin(LaneObject *lane, ListenerObject *listener);
ListenerObject *anticipate_finish(LaneObject *lane, PyObject *answer);
ListenerObject *anticipate_whom(LanesObject *lanes);

#endif
