/* When the next request of a burst is due, and whether to prepare for it: the rule of anticipation. Plain C11 without Python.
 * tests/fmq/native/rhythm.c runs this file. _anticipate.c acts on it.
 *
 *     frame      due - lead        due          due + RHYTHM_LATE_NS
 *       |            |              |                |
 *       |   sleep    |  warm run    |   look         |  sleep
 *
 * Eight intervals that are mostly alike make a rhythm. The lead is learned: it grows at once when a frame came before the warm run
 * was over, and shrinks slowly otherwise. A frame counts as hit if it came while a lane looked for it. One frame in RHYTHM_CONTROL is
 * not anticipated, so that its service time can be compared. Anticipation rests for RHYTHM_REST frames when it does not pay:
 * too few hits, frames that are not served faster, or too much time spent.
 *
 * Invariants
 *     `due_ns` is 0 while there is no rhythm, and while anticipation rests.
 *     There is at most one warm run between two frames.
 *     With `asked` false nothing is ever due. */
#ifndef AIONN_FMQ_RHYTHM_H
#define AIONN_FMQ_RHYTHM_H

#include <stdbool.h>
#include <stdint.h>

#define RHYTHM_INTERVALS 8u
#define RHYTHM_ALIKE 6u                        /* so many of them must be near the median */
#define RHYTHM_NEAR_NS INT64_C(1000000)        /* and at most a quarter of the median */
#define RHYTHM_LEAST_LEAD_NS INT64_C(100000)
#define RHYTHM_MOST_LEAD_NS INT64_C(5000000)
#define RHYTHM_MARGIN_NS INT64_C(200000)       /* between the end of the warm run and the frame */
#define RHYTHM_LATE_NS INT64_C(700000)         /* a frame may be late by so much */
#define RHYTHM_LOOK_NS INT64_C(1500000)        /* the longest look */
#define RHYTHM_HOT_NS 2000000.0                /* a longer run gains too little */
#define RHYTHM_CONTROL 16u
#define RHYTHM_REST 256u
#define RHYTHM_HITS 0.4                        /* so many guesses must be right */
#define RHYTHM_ENOUGH 4u                       /* samples of each kind that allow a comparison */
#define RHYTHM_PAYS 0.9                        /* an anticipated frame must be served in so much of the usual time */
#define RHYTHM_COST 0.07                       /* of a core, at most */

struct rhythm {
    bool asked;
    bool announced;                            /* the app has said that a request comes soon, since the last frame */
    bool early;                                /* a frame came before the warm run for it was over */
    bool warm;                                 /* the frame that was taken last came while a lane looked for it */
    bool cold;                                 /* nothing was done for the frame that was taken last */
    int64_t intervals_ns[RHYTHM_INTERVALS];
    unsigned intervals, frames, foreseen;      /* `foreseen`: frames that came while a lane looked for them */
    unsigned resting, deaf;                    /* so many frames are not anticipated, or not by the app's announcements */
    bool paused;
    int64_t arrived_ns, mean_ns;               /* the last frame, and a moving average of all intervals */
    int64_t period_ns, due_ns, lead_ns;
    int64_t warm_from_ns, warm_until_ns;       /* of the warm run since the last frame, or 0 */
    int64_t look_until_ns, spent_ns;           /* since the last frame */
    double hot_ns, plain_ns, cost_ns;          /* moving averages: two service times, and what a frame costs */
    double hits, heard;                        /* how often a guess was right, by the rhythm and by an announcement */
    unsigned hot, plain;                       /* samples */
};

static inline void rhythm_begin(struct rhythm *r, bool asked) { *r = (struct rhythm){.asked = asked, .hits = 1, .heard = 1}; }

static inline void rhythm_rest(struct rhythm *r)
{
    r->resting = RHYTHM_REST;
    r->due_ns = 0;
    r->hot = 0;
    r->hits = 1;
    r->cost_ns = 0;
}

/* Return the median if most intervals are near it, or 0. */
static inline int64_t rhythm_period(const struct rhythm *r)
{
    int64_t sorted[RHYTHM_INTERVALS];
    unsigned near = 0;
    if (r->intervals < RHYTHM_INTERVALS)
        return 0;
    for (unsigned i = 0; i < RHYTHM_INTERVALS; i++) {
        unsigned at = i;
        for (; at && sorted[at - 1] > r->intervals_ns[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = r->intervals_ns[i];
    }
    int64_t median = (sorted[RHYTHM_INTERVALS / 2 - 1] + sorted[RHYTHM_INTERVALS / 2]) / 2;
    int64_t tolerance = median / 4 < RHYTHM_NEAR_NS ? median / 4 : RHYTHM_NEAR_NS;
    for (unsigned i = 0; i < RHYTHM_INTERVALS; i++)
        near += sorted[i] - median <= tolerance && median - sorted[i] <= tolerance;
    return near >= RHYTHM_ALIKE ? median : 0;
}

static inline void rhythm_note_interval(struct rhythm *r, int64_t ns)
{
    bool pause = r->period_ns && ns > 2 * r->period_ns, again = pause && r->paused;
    r->paused = pause && !again;
    if (r->paused)
        return; /* one pause does not end a rhythm */
    if (again)
        r->intervals = 0; /* two in a row are another rhythm */
    r->intervals_ns[r->intervals++ % RHYTHM_INTERVALS] = ns;
    if (r->intervals >= 2 * RHYTHM_INTERVALS)
        r->intervals -= RHYTHM_INTERVALS;
    r->period_ns = rhythm_period(r);
}

/* Whether warm runs are allowed now, by what they cost and gained so far. */
static inline bool rhythm_may(const struct rhythm *r)
{
    double run_ns = r->hot ? r->hot_ns : r->plain_ns / 2;
    if (!r->asked || r->resting || r->plain < RHYTHM_ENOUGH || run_ns > RHYTHM_HOT_NS || r->frames % RHYTHM_CONTROL == 0)
        return false;
    return r->plain_ns + 2 * (double)RHYTHM_MARGIN_NS <= RHYTHM_COST * (double)r->mean_ns;
}

static inline void rhythm_bound_lead(struct rhythm *r)
{
    if (r->lead_ns < RHYTHM_LEAST_LEAD_NS)
        r->lead_ns = RHYTHM_LEAST_LEAD_NS;
    if (r->lead_ns > RHYTHM_MOST_LEAD_NS)
        r->lead_ns = RHYTHM_MOST_LEAD_NS;
}

/* What the time before this frame shows: was it foreseen, and was the lead right? */
static inline void rhythm_judge(struct rhythm *r, int64_t now_ns)
{
    r->warm = r->warm_until_ns && !r->early && now_ns <= r->look_until_ns;
    r->cold = !r->warm_from_ns;
    r->foreseen += r->warm;
    r->cost_ns += ((double)r->spent_ns - r->cost_ns) / 16;
    double *hits = r->announced ? &r->heard : &r->hits;
    if (!r->cold)
        *hits += ((r->warm ? 1.0 : 0.0) - *hits) / 16;
    if (r->warm && r->due_ns && !r->announced && now_ns - r->warm_until_ns > RHYTHM_MARGIN_NS) {
        r->lead_ns -= (now_ns - r->warm_until_ns - RHYTHM_MARGIN_NS) / 16;
        rhythm_bound_lead(r);
    }
    if (r->hits < RHYTHM_HITS || r->cost_ns > RHYTHM_COST * (double)r->mean_ns)
        rhythm_rest(r);
    if (r->heard < RHYTHM_HITS) {
        r->deaf = RHYTHM_REST;
        r->heard = 1;
    }
}

/* A frame was taken from the queue. */
static inline void rhythm_arrived(struct rhythm *r, int64_t now_ns)
{
    if (!r->asked)
        return;
    int64_t at_ns = r->early ? r->warm_from_ns / 2 + r->warm_until_ns / 2 : now_ns, due_ns = r->due_ns;
    rhythm_judge(r, now_ns);
    if (r->arrived_ns) {
        r->mean_ns += r->mean_ns ? (at_ns - r->arrived_ns - r->mean_ns) / 16 : at_ns - r->arrived_ns;
        rhythm_note_interval(r, at_ns - r->arrived_ns);
    }
    r->frames++;
    r->resting -= r->resting > 0;
    r->deaf -= r->deaf > 0;
    r->arrived_ns = at_ns;
    r->early = r->announced = false;
    r->warm_from_ns = r->warm_until_ns = r->look_until_ns = r->spent_ns = 0;
    /* The app's own lateness does not move the next frame, so half of it counts. */
    if (due_ns && at_ns - due_ns < RHYTHM_NEAR_NS && due_ns - at_ns < RHYTHM_NEAR_NS)
        at_ns -= (at_ns - due_ns) / 2;
    r->due_ns = r->period_ns && !r->resting ? at_ns + r->period_ns : 0;
    if (r->due_ns && !r->lead_ns) {
        r->lead_ns = (int64_t)r->plain_ns + 2 * RHYTHM_MARGIN_NS;
        rhythm_bound_lead(r);
    }
}

/* The frame that was taken last has been answered. */
static inline void rhythm_served(struct rhythm *r, int64_t service_ns)
{
    if (!r->asked)
        return;
    double ns = (double)service_ns;
    if (r->warm)
        r->hot_ns += (ns - r->hot_ns) / (r->hot < 8 ? ++r->hot : 8);
    else if (r->cold)
        r->plain_ns += (ns - r->plain_ns) / (r->plain < 8 ? ++r->plain : 8);
    if (r->hot >= RHYTHM_ENOUGH && r->plain >= RHYTHM_ENOUGH && r->hot_ns > RHYTHM_PAYS * r->plain_ns)
        rhythm_rest(r);
}

/* Return when a lane that has nothing to do must wake for the warm run. Returns 0 if none is to be made. */
static inline int64_t rhythm_wake_ns(const struct rhythm *r, int64_t now_ns)
{
    if (!r->due_ns || r->warm_from_ns || !rhythm_may(r))
        return 0;
    return r->due_ns - r->lead_ns > now_ns ? r->due_ns - r->lead_ns : 0;
}

/* The app has announced a request. Return whether to make a warm run now. */
static inline bool rhythm_announce(struct rhythm *r)
{
    if (r->deaf || r->warm_from_ns || !rhythm_may(r))
        return false;
    return r->announced = true;
}

/* A warm run begins. */
static inline void rhythm_warm(struct rhythm *r, int64_t now_ns) { r->warm_from_ns = now_ns; }

/* A warm run is over. `there`: a frame came meanwhile. */
static inline void rhythm_warmed(struct rhythm *r, int64_t began_ns, int64_t now_ns, bool there)
{
    r->spent_ns += now_ns - began_ns;
    if (r->warm_from_ns != began_ns)
        return; /* another lane has taken the frame meanwhile */
    r->warm_until_ns = now_ns;
    r->early = there;
    if (there && r->due_ns && !r->announced) {
        r->lead_ns += (now_ns - began_ns) / 2 + RHYTHM_MARGIN_NS;
        rhythm_bound_lead(r);
    }
}

/* Begin the look after a warm run. Return how long it may take. */
static inline int64_t rhythm_look_ns(struct rhythm *r, int64_t now_ns)
{
    int64_t until_ns = now_ns + RHYTHM_LOOK_NS;
    if (!r->warm_until_ns || r->early || r->look_until_ns)
        return 0;
    if (r->due_ns && !r->announced && r->due_ns + RHYTHM_LATE_NS < until_ns)
        until_ns = r->due_ns + RHYTHM_LATE_NS;
    r->look_until_ns = until_ns;
    return until_ns > now_ns ? until_ns - now_ns : 0;
}

/* A look has taken so long. */
static inline void rhythm_looked(struct rhythm *r, int64_t ns) { r->spent_ns += ns; }

/* No warm run can be made of these requests. Do not try for a while. */
static inline void rhythm_cannot(struct rhythm *r) { rhythm_rest(r); }

#endif
