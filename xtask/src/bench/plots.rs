//! Plots as SVG, to be set into the page. Legends are HTML: see [`super::html`].

use std::fmt::Write;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::text;

/// A line of a plot against token counts.
pub struct Line {
    /// What the legend says.
    pub name: String,
    pub color: RGBColor,
    /// A limit to compare with, not a measured thing of its own kind.
    pub dashed: bool,
    /// Token count and value.
    pub points: Vec<(u64, f64)>,
}

/// Bars of one kind, one for each token count.
pub struct Bars {
    /// What the legend says.
    pub name: String,
    pub color: RGBColor,
    /// Token count and value.
    pub values: Vec<(u64, f64)>,
}

pub const BLUE: RGBColor = RGBColor(0x2a, 0x78, 0xd6);
pub const ORANGE: RGBColor = RGBColor(0xeb, 0x68, 0x34);
pub const GREEN: RGBColor = RGBColor(0x1b, 0xaf, 0x7a);
pub const GREY: RGBColor = RGBColor(0x6b, 0x6a, 0x66);
const INK: RGBColor = RGBColor(0x0b, 0x0b, 0x0b);
const GRID: RGBColor = RGBColor(0xe6, 0xe5, 0xe1);
const AXIS: RGBColor = RGBColor(0xb8, 0xb7, 0xb2);

const SIZE: (u32, u32) = (860, 360);
const FONT: &str = "system-ui, sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A color as CSS has it.
pub fn css(color: RGBColor) -> String {
    let mut text = String::from("#");
    for part in [color.0, color.1, color.2] {
        write!(text, "{part:02x}").expect("a string takes everything");
    }
    text
}

/// Draws into a string.
fn svg(label: &str, draw: impl FnOnce(&Area) -> Result<()>) -> Result<String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw(&area)?;
        area.present().map_err(failed)?;
    }
    // Read aloud instead of the drawing; the size is the page's matter.
    let start = text.find("<svg ").ok_or_else(|| anyhow!("no drawing"))?;
    let view = format!(
        "<svg role=\"img\" aria-label=\"{}\" viewBox=\"0 0 {} {}\" ",
        text::escape(label),
        SIZE.0,
        SIZE.1
    );
    let rest = text[start..]
        .split_once('>')
        .ok_or_else(|| anyhow!("no drawing"))?
        .1;
    Ok(format!("{view}xmlns=\"http://www.w3.org/2000/svg\">{rest}"))
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

fn style(size: i32, color: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&color)
}

/// A round upper end for values up to `max`, and the step between its grid lines.
fn scale(max: f64) -> (f64, f64) {
    let max = if max.is_finite() && max > 0.0 {
        max
    } else {
        1.0
    };
    let power = 10f64.powf(max.log10().floor());
    let step = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|step| max / step <= 6.0)
        .unwrap_or(10.0 * power);
    ((max / step).ceil() * step, step)
}

/// Grid lines with their values at the left, and a title for them above.
struct Frame {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
    max: f64,
}

impl Frame {
    fn draw(area: &Area, max: f64, title: &str) -> Result<Self> {
        let (max, step) = scale(max);
        let (width, height) = area.dim_in_pixel();
        let frame = Self {
            left: 44,
            right: width as i32 - 14,
            top: 34,
            bottom: height as i32 - 46,
            max,
        };
        let decimals = if step < 0.999 { 1 } else { 0 };
        for index in 0..=(max / step).round() as i32 {
            let value = f64::from(index) * step;
            let y = frame.y(value);
            let color = if index == 0 { AXIS } else { GRID };
            area.draw(&PathElement::new(
                [(frame.left, y), (frame.right, y)],
                color,
            ))
            .map_err(failed)?;
            frame.label(
                area,
                &format!("{value:.decimals$}"),
                (frame.left - 8, y),
                style(13, GREY).pos(Pos::new(HPos::Right, VPos::Center)),
            )?;
        }
        frame.label(area, title, (4, 8), style(13, GREY))?;
        frame.label(
            area,
            "tokens",
            ((frame.left + frame.right) / 2, frame.bottom + 26),
            style(13, GREY).pos(Pos::new(HPos::Center, VPos::Top)),
        )?;
        Ok(frame)
    }

    fn y(&self, value: f64) -> i32 {
        let height = f64::from(self.bottom - self.top);
        self.bottom - (value / self.max * height).round() as i32
    }

    fn label(&self, area: &Area, text: &str, at: (i32, i32), style: TextStyle) -> Result<()> {
        area.draw_text(text, &style, at).map_err(failed)
    }

    fn tokens(&self, area: &Area, count: u64, x: i32) -> Result<()> {
        self.label(
            area,
            &text::tokens(count),
            (x, self.bottom + 7),
            style(13, GREY).pos(Pos::new(HPos::Center, VPos::Top)),
        )
    }
}

/// Lines against the logarithm of the token count.
pub fn lines(label: &str, title: &str, lines: &[Line]) -> Result<String> {
    svg(label, |area| {
        let points = || lines.iter().flat_map(|line| &line.points);
        let max = points().map(|point| point.1).fold(0.0, f64::max);
        let frame = Frame::draw(area, max, title)?;
        let mut counts: Vec<u64> = points().map(|point| point.0).collect();
        counts.sort_unstable();
        counts.dedup();
        let log = |count: u64| (count.max(1) as f64).log2();
        let first = counts.first().map_or(0.0, |count| log(*count));
        let span = counts.last().map_or(1.0, |count| log(*count) - first);
        // The outermost points keep a distance from the edges.
        let (start, end) = (frame.left + 24, frame.right - 30);
        let x = |count: u64| {
            let part = if span > 0.0 {
                (log(count) - first) / span
            } else {
                0.5
            };
            start + (part * f64::from(end - start)).round() as i32
        };
        for count in &counts {
            frame.tokens(area, *count, x(*count))?;
        }
        for line in lines {
            let place = |point: &(u64, f64)| (x(point.0), frame.y(point.1));
            let path: Vec<_> = line.points.iter().map(place).collect();
            if line.dashed {
                let dashes = DashedPathElement::new(path, 6, 5, line.color.stroke_width(2));
                area.draw(&dashes).map_err(failed)?;
                continue;
            }
            area.draw(&PathElement::new(path.clone(), line.color.stroke_width(2)))
                .map_err(failed)?;
            for point in path {
                // A ring of the page's color keeps points apart from lines that they lie on.
                area.draw(&Circle::new(point, 6, WHITE.filled()))
                    .map_err(failed)?;
                area.draw(&Circle::new(point, 4, line.color.filled()))
                    .map_err(failed)?;
            }
        }
        Ok(())
    })
}

/// Bars side by side for each token count, with their values on top and a line at each mark.
pub fn bars(label: &str, title: &str, bars: &[Bars], marks: &[(f64, &str)]) -> Result<String> {
    svg(label, |area| {
        let values = || bars.iter().flat_map(|bars| &bars.values);
        let max = values()
            .map(|value| value.1)
            .chain(marks.iter().map(|mark| mark.0))
            .fold(0.0, f64::max);
        let frame = Frame::draw(area, max * 1.05, title)?;
        let mut counts: Vec<u64> = values().map(|value| value.0).collect();
        counts.sort_unstable();
        counts.dedup();
        // Room for the marks' names at the right.
        let right = if marks.is_empty() {
            frame.right
        } else {
            frame.right - 66
        };
        let slot = (right - frame.left) / counts.len().max(1) as i32;
        let width = (slot * 7 / 10 / bars.len().max(1) as i32).clamp(2, 44);
        // Under the bars, so that their values can be read.
        for (value, name) in marks {
            let y = frame.y(*value);
            let path = vec![(frame.left, y), (right, y)];
            area.draw(&DashedPathElement::new(path, 4, 4, INK.stroke_width(1)))
                .map_err(failed)?;
            frame.label(
                area,
                name,
                (right + 6, y),
                style(13, INK).pos(Pos::new(HPos::Left, VPos::Center)),
            )?;
        }
        for (index, count) in counts.iter().enumerate() {
            let middle = frame.left + slot * index as i32 + slot / 2;
            frame.tokens(area, *count, middle)?;
            let start = middle - width * bars.len() as i32 / 2;
            for (place, kind) in bars.iter().enumerate() {
                let Some((_, value)) = kind.values.iter().find(|value| value.0 == *count) else {
                    continue;
                };
                let x = start + width * place as i32;
                let y = frame.y(*value);
                area.draw(&Rectangle::new(
                    [(x + 1, y), (x + width - 1, frame.bottom)],
                    kind.color.filled(),
                ))
                .map_err(failed)?;
                let decimals = if *value < 20.0 { 2 } else { 0 };
                let number = format!("{value:.decimals$}");
                let half = number.len() as i32 * 7 / 2 + 1;
                area.draw(&Rectangle::new(
                    [
                        (x + width / 2 - half, y - 17),
                        (x + width / 2 + half, y - 2),
                    ],
                    WHITE.filled(),
                ))
                .map_err(failed)?;
                frame.label(
                    area,
                    &number,
                    (x + width / 2, y - 4),
                    style(12, INK).pos(Pos::new(HPos::Center, VPos::Bottom)),
                )?;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_round_and_high_enough() {
        for (max, end, step) in [
            (4.2, 5.0, 1.0),
            (0.9, 1.0, 0.2),
            (2.94, 3.0, 0.5),
            (33.0, 40.0, 10.0),
        ] {
            let found = scale(max);
            assert!((found.0 - end).abs() < 1e-9, "{max}: {found:?}");
            assert!((found.1 - step).abs() < 1e-9, "{max}: {found:?}");
        }
        assert!(scale(f64::NAN).0 > 0.0);
    }

    #[test]
    fn an_empty_plot_is_drawn_too() {
        let drawn = lines("nothing", "TB/s", &[]).unwrap();
        assert!(drawn.starts_with("<svg role="), "{drawn}");
        assert!(
            drawn.ends_with("</svg>\n") || drawn.ends_with("</svg>"),
            "{drawn}"
        );
        bars("nothing", "", &[], &[]).unwrap();
    }
}
